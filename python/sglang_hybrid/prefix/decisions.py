"""The decisions of one cache: where a request saves states, and what is evicted when memory is short.

The scheduler (`engine/cache`) and the simulator (`sim`) ask the same object the same questions. Memory is a pool of
states and one of KV, two more in a host tier, or one budget of bytes for both kinds: each pool has an index of what
could be evicted from it, priced in the bytes it would free there, and all share one history. Nothing here touches a
tensor; every call can be logged and replayed (`request_log`), and a replay takes the same decisions.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix import policies
from sglang_hybrid.prefix.admission import ANYWHERE, Places
from sglang_hybrid.prefix.eviction import forecast
from sglang_hybrid.prefix.eviction.candidates import Candidate, VictimIndex
from sglang_hybrid.prefix.eviction.marconi import FlopAware, FlopAwareIndex
from sglang_hybrid.prefix.eviction.tuner import RegretTuner
from sglang_hybrid.prefix.guard.guard import Guard, GuardedIndex, passed, restored
from sglang_hybrid.prefix.guard.shadow import UNLIMITED
from sglang_hybrid.prefix.namespaces import Namespaces
from sglang_hybrid.prefix.policies import Policy, Pricing
from sglang_hybrid.prefix.pools import PoolKind, priced
from sglang_hybrid.prefix.request import NO_LIMIT, Request
from sglang_hybrid.prefix.reuse.classes import PRIORS
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints, hint_classes
from sglang_hybrid.prefix.reuse.history import History, HistoryMatch
from sglang_hybrid.prefix.reuse.table import ReuseTable
from sglang_hybrid.prefix.tree.mark import Kind, Mark
from sglang_hybrid.prefix.tree.tokens import Tokens, as_tokens, common_prefix

_PREFILLING = 64

_HISTORY_TOKENS = 32_000_000
"""Of prompts that are remembered, and at most of the shadow's tree."""


class Decisions:
    """History, admission and eviction of one cache under `policy`, one of its own or a name (`policies.find`).

    `where`: the positions at which states can be saved. The guard of a guarded policy can be left out (`guarded`): it
    needs to be told what is `saved` and what has to `fit`.
    """

    def __init__(
        self,
        model: ModelSpec,
        policy: str | Policy = policies.DEFAULT,
        where: Places = ANYWHERE,
        guarded: bool = True,
    ) -> None:
        chosen = policies.find(policy) if isinstance(policy, str) else policy
        self.model, self.policy = model, chosen
        self._admission = chosen.admission()
        self.table = ReuseTable(PRIORS)
        self.history = History(self.table, max_tokens=_HISTORY_TOKENS, context_tokens=model.context_tokens)
        self._where = where
        self.guard: Guard | None = None
        if guarded and chosen.guarded:
            self.guard = Guard(model.kv_bytes_per_token, model.checkpoint_bytes)
        self.flop_aware = FlopAware(model, chosen.alpha)
        self._tuner = RegretTuner(self.flop_aware) if chosen.tuner == "regret" else None
        self._orders: dict[PoolKind, VictimIndex] = {}
        self._indices: dict[PoolKind, VictimIndex] = {}
        for pool in PoolKind:
            order = chosen.eviction(Pricing(priced(model, pool), self.table, self.flop_aware))
            self._orders[pool] = order
            self._indices[pool] = order if self.guard is None else GuardedIndex(order, self.guard)
        self._latest = self._orders[PoolKind.STATES]  # whose victim left last
        self.namespaces = Namespaces()
        self._prefilling: OrderedDict[str, Tokens] = OrderedDict()
        self._placed: dict[Mark, tuple[object, int]] = {}  # the node of the cache that has the mark, and where it ends
        self._uses = 0

    def arrive(
        self,
        request_id: str,
        tokens: Tokens,
        now: float,
        cached_tokens: int,
        kv_tokens: int,
        namespace: str | None = None,
        boundaries: tuple[int, ...] = (),
        limit_tokens: int = NO_LIMIT,
        hints: Hints = NO_HINTS,
    ) -> Request:
        """The prefill of the prompt `tokens` begins at `cached_tokens`; KV of `kv_tokens` is cached. Learns from it.

        It could not have begun behind `limit_tokens`, whatever was cached. Raises ConfigError for other boundaries.
        """
        n_prompt = len(tokens)
        if boundaries and any(not 0 < at <= n_prompt for at in boundaries):
            raise ConfigError(f"a boundary is a position in the {n_prompt} tokens of the prompt: {boundaries}")
        key = self.namespaces.keyed(tokens, namespace)
        # The history counts the token of the namespace as well.
        known = self.history.observe(key, n_prompt + 1, now, tuple([at + 1 for at in boundaries]))
        self._uses += 1
        request = Request(request_id, now, n_prompt, cached_tokens, kv_tokens, key, known.tip, boundaries, limit_tokens)
        for other in self._prefilling.values():
            request.in_flight_tokens = max(request.in_flight_tokens, common_prefix(key, other) - 1)
        _enter(request, known)
        if hints is not NO_HINTS:
            self._heed(request, known, hints)
        seen = request.seen_tokens
        announced = known.kept_tokens == 0  # no request has computed more of it than the marks that requests have left
        computed = max([at for at, mark in request.earlier if not mark.announced], default=0) if announced else seen
        self._blame(request, known.dropped_tokens if known.dropped_tokens <= seen else 0)
        # The state of the last token is of no use to the same prompt: its logits need one token computed.
        end = n_prompt - 1
        chosen = self._admission.positions(request, cached_tokens, end, kv_tokens)
        if self.guard is not None:
            self._compare(self.guard, request, min(limit_tokens, end))
            if self.guard.by_recency:
                chosen = restored(chosen, cached_tokens, request.lru_tokens)
        request.positions, request.seen_tokens = tuple(chosen), computed
        self._prefilling[request_id] = key
        if len(self._prefilling) > _PREFILLING:
            self._prefilling.popitem(last=False)
        return request

    def marked(self, request: Request, segments: Sequence[tuple[int, int, bytes]]) -> None:
        """Its client marked the segments (start, end, key). Decides nothing here; a log says it (`request_log`)."""

    def _heed(self, request: Request, known: HistoryMatch, hints: Hints) -> None:
        request.hint, marked = hint_classes(hints, self.namespaces.turn(request.key))
        if marked and not known.declared:
            request.hint = request.hint or marked
        for mark in [mark for _, mark in known.declared if marked and not mark.hits]:
            self.history.hint(mark, marked)  # what was used since is known by its uses
        if request.hint:
            self.history.hint(known.tip, request.hint)

    def _blame(self, request: Request, dropped: int) -> None:
        """Find the deepest state that was evicted, and the deepest that was not taken; tell the tuner of the first."""
        lost: Mark | None = None
        request.lost_tokens = request.prompt_tokens if request.tip.evicted else dropped  # of the same prompt before
        request.tip.announced = False
        for at, mark in request.earlier:
            mark.announced = False
            if request.cached_tokens < at < request.prompt_tokens:
                if mark.evicted:
                    request.lost_tokens, lost = max(at, request.lost_tokens), mark
                if mark.refused:
                    request.refused_tokens = at
        if self._tuner is not None and lost is not None:
            self._tuner.missed(lost)

    def _compare(self, guard: Guard, request: Request, limit: int) -> None:
        """Tell the guard what the request skips; its shadow counts the namespace's token as well."""
        start, grid = request.cached_tokens, self._where.grid
        lru = guard.arrive(request.key, limit + 1 if limit > 0 else 0, start + 1 if start else 0)
        request.lru_tokens, request.shadow = max(0, lru.resume_tokens - 1), lru.node
        if request.lru_tokens < min(start, limit) and self.model.checkpoint_bytes:
            known = max(request.lru_tokens, lru.kv_tokens - 1)
            saved = passed(self._admission, guard, request, known)
            self._offer(guard, request, [at for at in {at // grid * grid for at in saved} if at > request.lru_tokens])

    def _offer(self, guard: Guard, request: Request, positions: list[int]) -> None:
        shadow = guard.shadow
        request.shadow = shadow.save(request.key, [at + 1 for at in sorted(positions)], request.shadow)
        if shadow.tree.kv_tokens > _HISTORY_TOKENS:
            shadow.fit(kv_tokens=_HISTORY_TOKENS)

    def saved(self, request: Request, positions: list[int]) -> None:
        """States of the request at `positions` are cached now, or would be if they had not been there."""
        request.saved_tokens = max([request.saved_tokens, *positions])
        if self.guard is not None and positions:
            self._offer(self.guard, request, [at for at in positions if at < request.key.size])

    def fit(self, states: int = UNLIMITED, kv_tokens: int = UNLIMITED, held_bytes: int = UNLIMITED) -> None:
        """Something has to leave, until the cache holds no more than that: of both pools or, if shared, in bytes."""
        if self.guard is not None:
            self.guard.shadow.fit(states, kv_tokens, held_bytes)

    def flushed(self) -> None:
        """The cache was emptied."""
        if self.guard is not None:
            self.guard.shadow.clear()
        self._placed.clear()

    @property
    def by_recency(self) -> bool:
        """Whether the order of eviction is that of recency for now."""
        return self.guard is not None and self.guard.by_recency

    def uses(self, request: Request) -> list[int]:
        """Where the states lie that the request uses by resuming where it does; `touch` them in this order.

        For recency that is where LRU resumes it, too; what LRU computes anew is saved there now (`restored`).
        """
        start = request.cached_tokens
        lru = start if self.guard is None else request.lru_tokens
        if lru >= start:
            return [] if self.by_recency and lru > start else [start]
        return [lru, start]

    def resumed(self, request: Request, held: Mark) -> None:
        """The request resumes at the state of `held`, which need not be the deepest that the history knows there."""
        now = request.arrived_s
        if any(mark is held for _, mark in request.earlier):
            self.history.resumed(held, now)
        elif held.stage < 0 and held.last_s < now:  # the history does not know it any more, or never did
            held.use(now)
            held.reuse_class = self.history.class_of(held)

    def computed(self, request_id: str) -> None:
        """The request's prefill is done: what it computed is in the cache now."""
        self._prefilling.pop(request_id, None)

    def answer_positions(self, request: Request, tokens: int) -> list[int]:
        """Where the answer of a request that ends after `tokens` tokens is worth a state."""
        return self._admission.positions(request, request.prompt_tokens, tokens, request.prompt_tokens)

    def finish(self, request: Request, tokens: Tokens, now: float, kept_tokens: int) -> None:
        """The request ended as `tokens`, prompt and answer; KV of `kept_tokens`, and before its states, is cached.

        One that was given up in mid-prefill ends with less than its prompt: nobody has computed the rest of that.
        """
        self.computed(request.id)
        size, n_prompt = len(tokens), request.prompt_tokens
        answer = as_tokens(tokens[n_prompt:])
        mark, leaf, grown = request.tip, request.leaf, False
        if leaf is not None and answer.size and leaf.end == request.key.size:
            grown = self.history.lengthen(leaf, answer, mark, now)
        key = np.concatenate((request.key, answer)) if answer.size else request.key[: size + 1]
        if size and not grown:
            mark = self.history.extend(key, mark, now)
        if size < n_prompt:
            self.history.shorten(request.key, max(size, request.seen_tokens) + 1)
        request.key, request.ended = key, True
        if request.hint and mark is not request.tip:
            self.history.hint(mark, request.hint)
        mark.unkept = max(0, size - max(kept_tokens, request.saved_tokens, request.cached_tokens))
        request.tip = request.marks[size] = mark

    def mark(self, request: Request | None, position: int, now: float, spare: bool = False) -> Mark:
        """The mark for a state at `position`; `spare` ones were taken only because memory was free."""
        found = None if request is None else request.marks.get(position)
        if found is None:
            found = Mark(Kind.SUPERSEDED if spare else Kind.FRESH, now)
            found.reuse_class = self.history.class_of(found)
            if request is not None:
                request.marks[position], found.heir = found, request.tip
        self.touch(found)
        found.evicted = False
        return found

    def planned_mark(self, request: Request | None, wanted: int, now: float, later: bool) -> Mark:
        """The mark for a state that was planned for the position `wanted`.

        The one nearest to the prompt's end stands for that until the answer has one. Where a `later` end is cached
        already, it has been superseded.
        """
        nearest = request is not None and wanted == max(request.positions, default=-1)
        if request is not None and nearest and not later:
            return request.tip
        return self.mark(request, wanted, now, spare=nearest)

    def touch(self, mark: Mark) -> None:
        """The state of `mark` was saved or used just now."""
        self._uses += 1
        mark.touch = self._uses

    def branch(self, request: Request, position: int, held: Mark | None) -> Mark | None:
        """The mark for the state at `position`, `held` so far, if others part there; None: it keeps its own.

        Not every position can have one, so one can stand for a branch and for an end: then it counts as the branch.
        """
        marks = request.marks
        shared = [at for at in marks if marks[at].shared and self._where.stands(position, at)]
        if not shared:
            return None
        mark = marks[max(shared)]
        if mark is held or self._placed.get(mark, (None, 0))[1] > position:
            return None
        if held is not None:
            mark.touch = max(mark.touch, held.touch)
            self._placed.pop(held, None)
        return mark

    def place(self, mark: Mark, node: object, end: int, now: float) -> list[tuple[object, Mark]]:
        """The state at `node` of the cache, behind `end` tokens, is to have `mark`: returns nodes with their new marks.

        No two states share a mark, or a use of one would leave the price of the other. Of two that stand for the same
        place, as of requests with the same prompt, the deeper one has the mark and the other is superseded.
        """
        placed = self._placed
        other, other_end = placed.get(mark, (node, end))
        if other_end > end:
            return [(node, self._old(mark, mark, now))]
        placed[mark] = (node, end)
        return [(node, mark)] if other is node else [(node, mark), (other, self._old(mark, mark, now))]

    def superseded(self, request: Request, mark: Mark, end: int, now: float) -> Mark | None:
        """What `mark` of the state at `end` becomes once a later end of its request is saved; None: others share it.

        Where a position right before is declared, the state may stand for that: then what is known of such ones counts.
        """
        if mark.shared:
            return None
        self._placed.pop(mark, None)
        for at, near in request.marks.items():
            if near.kind is Kind.DECLARED and near is not mark and self._where.stands(end, at):
                near.touch = max(near.touch, mark.touch)
                return near
        return self._old(mark, request.tip, now)

    def _old(self, mark: Mark, heir: Mark, now: float) -> Mark:
        old = Mark(Kind.SUPERSEDED, now, mark.touch)
        old.heir, old.reuse_class = heir, self.history.class_of(old)
        return old

    def put(self, pool: PoolKind, candidate: Candidate) -> None:
        """`candidate` can be evicted from `pool`, or what is known of it changed."""
        self._indices[pool].put(candidate)

    def discard(self, pool: PoolKind, candidate_id: int) -> None:
        """It cannot be evicted any more."""
        self._indices[pool].discard(candidate_id)

    def victim(self, pool: PoolKind, now: float) -> int | None:
        """Remove and return the id of what is worth least, None when nothing can go."""
        self._latest = self._orders[pool]
        return self._indices[pool].pop(now)

    def worth(self, candidate: Candidate, now: float) -> float:
        """What a byte of `candidate` is worth, whatever the order of eviction: the score of `forecast`."""
        return forecast.worth(self.model, self.table, candidate, now)

    def contenders(self, request: Request, wanted_at: Mapping[int, int], now: float) -> dict[int, Candidate]:
        """The states that a pass is to save, at places with what each stands for, as candidates beside the cached ones.

        By id, all below zero. `weakest` tells which of them are worth less than what would have to leave for them.
        """
        found = {}
        for number, (at, wanted) in enumerate(sorted(wanted_at.items()), 1):
            base = max([other for other in (request.cached_tokens, *request.positions) if other < at], default=0)
            mark = request.marks.get(wanted)
            hits, reuse_class = (0, int(Kind.FRESH)) if mark is None else (mark.hits, mark.reuse_class)
            found[-number] = Candidate(-number, at, base, base, 0, 1, 1, now, self._uses + 1, hits, False, reuse_class)
        return found

    def weakest(self, pool: PoolKind, contenders: Mapping[int, Candidate], count: int, now: float) -> list[int]:
        """The next `count` victims with `contenders` among what could leave; those are forgotten again."""
        for contender in contenders.values():
            self.put(pool, contender)
        found: list[int] = []
        while len(found) < count:
            victim = self.victim(pool, now)
            if victim is None:
                break
            found.append(victim)
        for number in contenders:
            if number not in found:
                self.discard(pool, number)
        return found

    def evicted(self, mark: Mark) -> None:
        """The state of `mark` was evicted: a later request that wanted it will be told so."""
        mark.evict(self._placed.pop(mark, (None, 0))[1])
        order = self._latest
        if self._tuner is not None and not self.by_recency and isinstance(order, FlopAwareIndex):
            self._tuner.evicted(mark, order.last_victim)

    def seed(self, tokens: Tokens, now: float, namespace: str | None = None) -> None:
        """Announce a hot prefix: the first request that computes it saves a state at its end."""
        self.history.seed(self.namespaces.keyed(tokens, namespace), now)

    def check(self) -> None:
        """Raise InvariantError where an index or the history contradicts itself."""
        self.history.check()
        if self.guard is not None:
            self.guard.check()
        for index in self._indices.values():
            index.check()


def _enter(request: Request, known: HistoryMatch) -> None:
    """Say in `request` what the history knows of it, by positions in the prompt: without the namespace's token."""
    request.seen_tokens = max(0, known.seen_tokens - 1)
    request.kept_tokens = max(-1, known.kept_tokens - 1)
    request.earlier = tuple([(at - 1, mark) for at, mark in known.marks])
    request.branch, request.leaf = known.branch, known.leaf
    marks = request.marks
    for at, mark in request.earlier:
        marks[at] = mark
    for at, mark in known.declared:
        marks[at - 1] = mark
    if known.branch is not None:
        marks[request.seen_tokens] = known.branch
    marks[request.prompt_tokens] = known.tip
