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
from sglang_hybrid.prefix.guard import Guard, GuardedIndex, passed, restored
from sglang_hybrid.prefix.history import History, Sighting
from sglang_hybrid.prefix.marconi import FlopAware, FlopAwareIndex
from sglang_hybrid.prefix.mark import Kind, Mark
from sglang_hybrid.prefix.node import Node
from sglang_hybrid.prefix.reuse import ReuseTable
from sglang_hybrid.prefix.shadow import UNLIMITED
from sglang_hybrid.prefix.tokens import Tokens, as_tokens, common_prefix
from sglang_hybrid.prefix.tuner import RegretTuner

_FIRST_NAMESPACE = 1 << 30  # above every vocabulary
_NAMESPACES = 1 << 16
_PREFILLING = 64

NO_LIMIT = 1 << 62

SHARED = (Kind.BRANCH, Kind.DECLARED)
"""Marks of positions that others begin with: the conversation that saved one does not supersede it."""

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

    Other requests computed `seen_tokens` of it; the latest of them had `kept_tokens` cached (-1: unknown). LRU would
    have restarted it at `lru_tokens`.
    """

    positions: tuple[int, ...]
    seen_tokens: int
    in_flight_tokens: int
    lost_tokens: int
    refused_tokens: int
    kept_tokens: int
    tip: Mark
    key: Tokens  # its input as the history keys it, all of it once it has ended; and its node there
    leaf: Node | None = None
    marks: dict[int, Mark] = field(default_factory=dict)
    lru_tokens: int = 0
    shadow: Node | None = None  # its deepest node in the guard's shadow
    ended: bool = False


class Decisions:
    """One server's history, admission and eviction. `eviction` is 'forecast' or 'marconi'; a name in ADMISSIONS.

    With `marconi_alpha` TUNED the weight follows the regret of past evictions; otherwise it is fixed. Requests restart
    at multiples of `grid` tokens. A `guarded` server never falls far behind LRU (`guard`), if told `saved` and `fit`.
    """

    def __init__(
        self,
        model: ModelSpec,
        admission: str = "judicious",
        eviction: str = "forecast",
        marconi_alpha: float = TUNED,
        history_tokens: int = 32_000_000,
        grid: int = 1,
        guarded: bool = True,
    ) -> None:
        if admission not in ADMISSIONS:
            raise ConfigError(f"unknown admission policy, choose one of {', '.join(ADMISSIONS)}: {admission!r}")
        self._admission = ADMISSIONS[admission]()
        self._table = ReuseTable(PRIORS)
        self.history = History(self._table, max_tokens=history_tokens, context_tokens=model.context_tokens)
        self._grid = grid
        self._history_tokens = history_tokens
        self.guard = Guard(model.kv_bytes_per_token, model.checkpoint_bytes) if guarded else None
        self._tuner: RegretTuner | None = None
        self._weighted: list[FlopAware] = []
        self._policies: dict[Pool, EvictionPolicy] = {}
        self._indices = {pool: self._guarded(self._index(pool, model, eviction, marconi_alpha)) for pool in Pool}
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

    def _guarded(self, index: VictimIndex) -> VictimIndex:
        return index if self.guard is None else GuardedIndex(index, self.guard)

    def arrive(
        self,
        request_id: str,
        tokens: Tokens,
        now: float,
        restart_tokens: int,
        known_tokens: int,
        namespace: str | None = None,
        boundaries: tuple[int, ...] = (),
        limit_tokens: int = NO_LIMIT,
    ) -> Arrival:
        """A prefill of the input `tokens` begins at `restart_tokens`; KV of `known_tokens` is cached. Learns from it.

        It could not have begun behind `limit_tokens`, whatever was cached. Raises ConfigError for other boundaries.
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
        if self._tuner is not None and lost:
            self._tuner.missed(marks[lost])
        # The state of the last input token is of no use to the same prompt: its logits need one token computed.
        # as in `RadixTree._walk`: the named constructors run Python code first
        here = tuple.__new__(Sighting, (seen, known, sighting.branch, sighting.tip))
        prefill: Prefill = tuple.__new__(
            Prefill, (restart_tokens, known_tokens, n_input, n_input - 1, boundaries, here)
        )
        chosen = self._admission.positions(prefill) if restart_tokens < n_input - 1 else []
        if sighting.branch is not None:
            marks[seen] = sighting.branch
        marks[n_input] = sighting.tip
        kept = max(-1, sighting.kept_tokens - 1)
        arrival = Arrival((), computed, in_flight, lost, refused, kept, sighting.tip, key, sighting.leaf, marks)
        if self.guard is not None:
            self._compare(self.guard, arrival, prefill, min(limit_tokens, n_input - 1))
            if self.guard.by_recency:
                chosen = restored(chosen, restart_tokens, arrival.lru_tokens)
        arrival.positions = tuple(chosen)
        self._prefilling[request_id] = key
        if len(self._prefilling) > _PREFILLING:
            self._prefilling.popitem(last=False)
        return arrival

    def _compare(self, guard: Guard, arrival: Arrival, prefill: Prefill, limit: int) -> None:
        """Tell the guard what the request skips; its shadow counts the namespace's token as well."""
        restart, key, grid = prefill.restart_tokens, arrival.key, self._grid
        lru = guard.arrive(key, limit + 1 if limit > 0 else 0, restart + 1 if restart else 0)
        arrival.lru_tokens, arrival.shadow = max(0, lru.restart_tokens - 1), lru.node
        if arrival.lru_tokens < min(restart, limit):
            known = max(arrival.lru_tokens, lru.kv_tokens - 1)
            saved = passed(self._admission, guard, prefill, arrival.lru_tokens, known)
            self._offer(guard, arrival, [at for at in {at // grid * grid for at in saved} if at > arrival.lru_tokens])

    def _offer(self, guard: Guard, arrival: Arrival, positions: list[int]) -> None:
        shadow = guard.shadow
        arrival.shadow = shadow.save(arrival.key, [at + 1 for at in sorted(positions)], arrival.shadow)
        if shadow.tree.kv_tokens > self._history_tokens:
            shadow.fit(kv_tokens=self._history_tokens)

    def saved(self, request_id: str, arrival: Arrival, positions: list[int]) -> None:
        """The request saved states at `positions`, or would have if they had not been there."""
        if self.guard is not None and positions:
            self._offer(self.guard, arrival, [at for at in positions if at < arrival.key.size])

    def fit(self, states: int = UNLIMITED, kv_tokens: int = UNLIMITED, held_bytes: int = UNLIMITED) -> None:
        """Something has to leave, until the cache holds no more than that: of both pools or, if shared, in bytes."""
        if self.guard is not None:
            self.guard.shadow.fit(states, kv_tokens, held_bytes)

    def flushed(self) -> None:
        """The cache was emptied."""
        if self.guard is not None:
            self.guard.shadow.clear()

    @property
    def by_recency(self) -> bool:
        """Whether the order of eviction is that of recency for now."""
        return self.guard is not None and self.guard.by_recency

    def uses(self, arrival: Arrival, restart_tokens: int) -> list[int]:
        """Where the states lie that the request's restart at `restart_tokens` uses, `touch` them in this order.

        For recency that is where LRU restarts it, too; what LRU computes anew is saved there now (`restored`).
        """
        lru = restart_tokens if self.guard is None else arrival.lru_tokens
        if lru >= restart_tokens:
            return [] if self.by_recency and lru > restart_tokens else [restart_tokens]
        return [lru, restart_tokens]

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
        key = np.concatenate((arrival.key, answer)) if answer.size else arrival.key[: size + 1]
        if size and not grown:
            mark = self.history.extend(key, mark, now)
        if size < n_input:
            self.history.shorten(arrival.key, max(size, arrival.seen_tokens) + 1)
        arrival.key, arrival.ended = key, True
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
        self.touch(found)
        found.lost = False
        return found

    def touch(self, mark: Mark) -> None:
        """The state of `mark` was saved or used just now."""
        self._uses += 1
        mark.touch = self._uses

    def branch(self, arrival: Arrival, position: int, held: Mark | None) -> Mark | None:
        """The mark for the state at `position`, `held` so far, if others part there; None: it keeps its own.

        States lie on the grid, so one can stand for a branch and for an end behind it: then it counts as the branch.
        """
        grid, marks = self._grid, arrival.marks
        shared = [at for at in marks if at // grid * grid == position and marks[at].kind in SHARED]
        if not shared:
            return None
        mark = marks[max(shared)]
        mark.touch = max(mark.touch, 0 if held is None else held.touch)
        return mark

    def superseded(self, mark: Mark, now: float) -> Mark | None:
        """What `mark`, an earlier end of a request, becomes once a later end is saved; None where others share it."""
        if mark.kind in SHARED:
            return None
        old = Mark(Kind.SUPERSEDED, now, mark.touch)
        old.reuse_class = self.history.class_of(old)
        return old

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
        if self._tuner is not None and not self.by_recency:
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
        if self.guard is not None:
            self.guard.check()
        for index in self._indices.values():
            index.check()
