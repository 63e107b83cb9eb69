"""The decisions of a serving cache: where to checkpoint a request, and which state or KV to give up.

A server has two pools of fixed size, and two more in a host tier if there is one, so there is an index of victims for
each and one history: the same policy objects as in the simulator, priced in the bytes of the pool that is short.
Nothing here touches a tensor; every call can be logged and replayed (`request_log`), and a replay takes the same
decisions.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.admission import ADMISSIONS, Prefill
from sglang_hybrid.prefix.candidates import Candidate, EvictionPolicy, VictimIndex
from sglang_hybrid.prefix.classes import PRIORS
from sglang_hybrid.prefix.forecast import Forecast, ForecastIndex
from sglang_hybrid.prefix.history import History, Sighting
from sglang_hybrid.prefix.marconi import FlopAware, FlopAwareIndex
from sglang_hybrid.prefix.mark import Kind, Mark
from sglang_hybrid.prefix.node import Node
from sglang_hybrid.prefix.reuse import ReuseTable
from sglang_hybrid.prefix.tokens import Tokens, as_tokens, common_prefix
from sglang_hybrid.prefix.tuner import RegretTuner

_FIRST_NAMESPACE = 1 << 30  # above every vocabulary
_NAMESPACES = 1 << 16
_PREFILLING = 64

TUNED = -1.0
"""Value of `marconi_alpha` that lets the regret tuner choose."""


class Pool(Enum):
    """What is short: states or KV, where they are computed with or in the host tier that backs them."""

    STATES = "states"
    KV = "kv"
    HOST_STATES = "host_states"
    HOST_KV = "host_kv"

    __hash__ = object.__hash__  # Enum's own runs Python code, and every decision looks an index up


@dataclass
class Arrival:
    """A request as the history saw it when its prefill began; positions in tokens of the request.

    Other requests computed `seen_tokens` of it; the latest of them had `kept_tokens` cached (-1: unknown).
    """

    positions: tuple[int, ...]
    seen_tokens: int
    in_flight_tokens: int
    lost_tokens: int
    refused_tokens: int
    kept_tokens: int
    tip: Mark
    key: Tokens  # its input as the history keys it, and its node there
    leaf: Node | None = None
    marks: dict[int, Mark] = field(default_factory=dict)


class Decisions:
    """One server's history, admission and eviction. `eviction` is 'forecast' or 'marconi'; a name in ADMISSIONS.

    With `marconi_alpha` TUNED the weight follows the regret of past evictions; otherwise it is fixed.
    """

    def __init__(
        self,
        model: ModelSpec,
        admission: str = "judicious",
        eviction: str = "forecast",
        marconi_alpha: float = TUNED,
        history_tokens: int = 32_000_000,
    ) -> None:
        if admission not in ADMISSIONS:
            raise ConfigError(f"unknown admission policy, choose one of {', '.join(ADMISSIONS)}: {admission!r}")
        self._admission = ADMISSIONS[admission]()
        self._table = ReuseTable(PRIORS)
        self.history = History(self._table, max_tokens=history_tokens, context_tokens=model.context_tokens)
        self._tuner: RegretTuner | None = None
        self._weighted: list[FlopAware] = []
        self._policies: dict[Pool, EvictionPolicy] = {}
        self._indices = {pool: self._index(pool, model, eviction, marconi_alpha) for pool in Pool}
        self._namespaces: OrderedDict[bytes, int] = OrderedDict()  # by digest: clients choose their length
        self._named = 0
        self._prefilling: OrderedDict[str, Tokens] = OrderedDict()
        self._uses = 0

    def _index(self, pool: Pool, model: ModelSpec, eviction: str, alpha: float) -> VictimIndex:
        priced = (
            replace(model, kv_bytes_per_token=0)
            if pool in (Pool.STATES, Pool.HOST_STATES)
            else replace(model, checkpoint_bytes=0, conv_bytes=0)
        )
        if eviction == "forecast":
            forecast = self._policies[pool] = Forecast(priced, self._table)
            return ForecastIndex(forecast)
        if eviction != "marconi":
            raise ConfigError(f"unknown eviction policy, choose forecast or marconi: {eviction!r}")
        policy = self._policies[pool] = FlopAware(model, max(alpha, 0.0))
        self._weighted.append(policy)
        index = FlopAwareIndex(policy)
        if alpha == TUNED and pool is Pool.STATES:
            self._tuner = RegretTuner(policy, index)
        return index

    def arrive(
        self,
        request_id: str,
        tokens: Tokens,
        now: float,
        restart_tokens: int,
        known_tokens: int,
        namespace: str | None = None,
        boundaries: tuple[int, ...] = (),
    ) -> Arrival:
        """A prefill of the input `tokens` begins at `restart_tokens`; KV of `known_tokens` is cached. Learns from it.

        Raises ConfigError for a boundary outside the input.
        """
        n_input = len(tokens)
        if boundaries and any(not 0 < at <= n_input for at in boundaries):
            raise ConfigError(f"a boundary is a position in the {n_input} tokens of the prompt: {boundaries}")
        key = self._keyed(tokens, namespace)
        in_flight = 0
        for other in self._prefilling.values():
            in_flight = max(in_flight, common_prefix(key, other) - 1)
        sighting = self.history.observe(key, n_input + 1, now, tuple(at + 1 for at in boundaries))
        self._uses += 1
        known = tuple([(at - 1, mark) for at, mark in sighting.marks])
        seen = max(0, sighting.seen_tokens - 1)
        marks = dict(known)
        lost = refused = 0
        computed = seen
        if sighting.kept_tokens == 0:
            computed = max((at for at, mark in known if not mark.announced), default=0)
        sighting.tip.announced = False
        for at, mark in known:  # the deepest of each kind
            mark.announced = False
            if restart_tokens < at < n_input:
                lost = at if mark.lost else lost
                refused = at if mark.refused else refused
            elif at == restart_tokens:
                mark.touch = self._uses
        if self._tuner is not None and lost:
            self._tuner.missed(marks[lost])
        positions: tuple[int, ...] = ()
        if restart_tokens < n_input - 1:
            # The state of the last input token is of no use to the same prompt: its logits need one token computed.
            # as in `RadixTree._walk`: the named constructors run Python code first
            here = tuple.__new__(Sighting, (seen, known, sighting.branch, sighting.tip))
            prefill: Prefill = tuple.__new__(
                Prefill, (restart_tokens, known_tokens, n_input, n_input - 1, boundaries, here)
            )
            positions = tuple(self._admission.positions(prefill))
        if sighting.branch is not None:
            marks[seen] = sighting.branch
        marks[n_input] = sighting.tip
        kept = max(-1, sighting.kept_tokens - 1)
        arrival = Arrival(positions, computed, in_flight, lost, refused, kept, sighting.tip, key, sighting.leaf, marks)
        self._prefilling[request_id] = key
        if len(self._prefilling) > _PREFILLING:
            self._prefilling.popitem(last=False)
        return arrival

    def computed(self, request_id: str) -> None:
        """The request's prefill is done: what it computed is in the cache now."""
        self._prefilling.pop(request_id, None)

    def finish(self, request_id: str, arrival: Arrival, tokens: Tokens, now: float, kept_tokens: int) -> None:
        """The request ended with the sequence `tokens`, input and output; KV of the first `kept_tokens` is cached.

        One that was given up in mid-prefill ends with less than its input: nobody has computed the rest of that.
        """
        self.computed(request_id)
        size, n_input = len(tokens), arrival.key.size - 1
        answer = as_tokens(tokens[n_input:])
        mark, leaf, grown = arrival.tip, arrival.leaf, False
        if leaf is not None and answer.size and leaf.end == arrival.key.size:
            grown = self.history.lengthen(leaf, answer, mark, now)
        if size and not grown:
            key = np.concatenate((arrival.key, answer)) if answer.size else arrival.key[: size + 1]
            mark = self.history.extend(key, mark, now)
        if size < n_input:
            self.history.shorten(arrival.key, max(size, arrival.seen_tokens) + 1)
        mark.unkept = max(0, size - kept_tokens)
        arrival.tip = arrival.marks[size] = mark

    def mark(self, arrival: Arrival | None, position: int, now: float, spare: bool = False) -> Mark:
        """The mark for a checkpoint at `position`; `spare` ones were taken only because memory was free."""
        found = None if arrival is None else arrival.marks.get(position)
        if found is None:
            found = Mark(Kind.SUPERSEDED if spare else Kind.FRESH, now)
            found.reuse_class = self.history.class_of(found)
            if arrival is not None:
                arrival.marks[position] = found
        self._uses += 1
        found.touch = self._uses
        found.lost = False
        return found

    def put(self, pool: Pool, candidate: Candidate) -> None:
        """`candidate` can be evicted from `pool`, or what is known of it changed."""
        self._indices[pool].put(candidate)

    def discard(self, pool: Pool, candidate_id: int) -> None:
        """It cannot be evicted any more."""
        self._indices[pool].discard(candidate_id)

    def victim(self, pool: Pool, now: float) -> int | None:
        """Remove and return the id of what is worth least, None when nothing can go."""
        if pool is not Pool.STATES and self._tuner is not None:
            self.alpha = self.alpha  # the tuner moves the weight of the states; one trade-off holds for all
        return self._indices[pool].pop(now)

    def evicted(self, mark: Mark) -> None:
        """The state of `mark` was given up: a later request that wanted it will be told so."""
        mark.lost = True
        if self._tuner is not None:
            self._tuner.evicted(mark)

    def policy(self, pool: Pool) -> EvictionPolicy:
        """The policy whose lowest score leaves `pool` next."""
        return self._policies[pool]

    @property
    def alpha(self) -> float | None:
        """Weight of FLOP efficiency in the pool of states; None unless eviction is Marconi's."""
        return self._weighted[0].alpha if self._weighted else None

    @alpha.setter
    def alpha(self, alpha: float | None) -> None:
        for policy in self._weighted:
            if alpha is not None:
                policy.alpha = alpha

    def seed(self, tokens: Tokens, now: float, namespace: str | None = None) -> None:
        """Announce a hot prefix: the first request that computes it checkpoints its end."""
        self.history.seed(self._keyed(tokens, namespace), now)

    def _keyed(self, tokens: Tokens, namespace: str | None) -> Tokens:
        """The tokens behind one that stands for their namespace: requests of different ones never meet."""
        tokens = as_tokens(tokens)
        key: Tokens = np.empty(tokens.size + 1, np.int32)
        key[0] = self._number(namespace)
        key[1:] = tokens
        return key

    def _number(self, namespace: str | None) -> int:
        """The token that stands for `namespace`; the one asked for longest ago is forgotten beyond `_NAMESPACES`."""
        name = None if namespace is None else namespace.encode(errors="surrogatepass")
        digest = b"" if name is None else blake2b(name, digest_size=16).digest()
        number = self._namespaces.pop(digest, None)
        if number is None:
            number = _FIRST_NAMESPACE + self._named
            self._named = (self._named + 1) % _FIRST_NAMESPACE
        self._namespaces[digest] = number
        if len(self._namespaces) > _NAMESPACES:
            self._namespaces.popitem(last=False)
        return number

    def check(self) -> None:
        """Raise InvariantError where an index or the history contradicts itself."""
        self.history.check()
        for index in self._indices.values():
            index.check()
