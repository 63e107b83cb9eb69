"""One scheduler's side of the cache: turns what SGLang does into questions to `Decisions`, and keeps accounts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache import requests
from sglang_hybrid.engine.cache.boundaries import first_message, named
from sglang_hybrid.engine.cache.checkpoint_slots import CheckpointSlots
from sglang_hybrid.engine.cache.metrics import Summary
from sglang_hybrid.engine.cache.requests import Tracked, tracked
from sglang_hybrid.engine.cache.victims import Victims, end_tokens
from sglang_hybrid.engine.compat import state_of
from sglang_hybrid.engine.hicache.tier import HostTier
from sglang_hybrid.prefix.admission import reachable
from sglang_hybrid.prefix.decisions import Decisions, Pool
from sglang_hybrid.prefix.misses import attribute
from sglang_hybrid.prefix.request import Request
from sglang_hybrid.prefix.tree.mark import Mark

logger = logging.getLogger(__name__)


class Driver:
    """Shared by the two components of one cache.

    `grid`: tokens between positions that can be restarted from (1 without the extra buffer). `step`: tokens between the
    states a forward pass can give back, counted from where the pass begins; 0 if it gives none. `admits` and `scores`
    say whether admission and eviction are ours; with neither, SGLang's decisions pass through and are only accounted.
    """

    def __init__(
        self,
        cache: Any,
        states: Any,
        decisions: Decisions,
        victims: Victims,
        clock: Callable[[], float],
        grid: int,
        step: int,
        admits: bool = True,
        scores: bool = True,
        log_interval_s: float = 0.0,
        message_end_ids: frozenset[int] = frozenset(),
        on_misses: Callable[[int, dict[str, int]], None] | None = None,
        tier: HostTier | None = None,
    ) -> None:
        self.cache = cache
        self.states = states
        self.slots = CheckpointSlots(states)
        self.decisions = decisions
        self.victims = victims
        self.grid = grid
        self.step = step if admits else 0
        self.admits = admits
        self.scores = scores
        self.capacity: Any = None  # elastic memory: one budget for both kinds (engine/pools)
        self.tier = tier
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._message_ends = sorted(message_end_ids)
        self._on_misses = on_misses
        self._summary = Summary(log_interval_s)
        self._root: Any = None

    def now(self) -> float:
        """Seconds, the same on every rank."""
        return self._clock()

    def _reclaim(self, count: int) -> int:
        """Take back up to `count` slots of checkpoints in the making; returns how many."""
        taken = self.slots.reclaim(count)
        self.counts["reclaimed"] += taken
        return taken

    def spare_states(self) -> bool:
        """Whether states may be taken that nobody asked for: an eighth of the pool and four slots are free."""
        if self.capacity is not None:
            return bool(self.capacity.spare_states())
        return bool(self.states.available_size() > self.states.size // 8 + 4)

    def plan(self, batch: Any) -> None:
        """A prefill batch is about to run: decide what each of its requests checkpoints, and find the slots."""
        if self.cache.disable:
            return
        if self.tier is not None:
            self.tier.back_up()
        for req, start, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            record = tracked(req)
            record.start = start
            self._arrive(req, record, start)
            self.slots.free_planned(record)
            if requests.streams(req):  # its session keeps what it computes; only the end of a first turn is inserted
                self.decisions.computed(req.rid)
            elif record.request is not None and self.step and not getattr(req, "skip_radix_cache_insert", False):
                self._reserve(record, start, start + length, start + length >= len(req.origin_input_ids))

    def _arrive(self, req: Any, record: Tracked, start: int) -> None:
        if record.request is not None:
            return  # a later chunk, or a request that was retracted
        core = self.cache.tree_core
        if self._root is not core.root_node:
            if self._root is not None:
                self.decisions.flushed()
            self._root = core.root_node
        record.prompt = tokens = requests.ids(req.origin_input_ids)
        record.request = request = self.decisions.arrive(
            req.rid,
            tokens,
            self.now(),
            start,
            max(start, record.known_tokens),
            requests.namespace(req),
            self._boundaries(req, tokens),
            0 if requests.streams(req) else requests.limit(req),  # a session's own KV is in no cache
        )
        self._use(record, request)
        record.misses = attribute(request, self.grid, max(self.grid, self.step), requests.limit(req))
        counts = self.counts
        counts["requests"] += 1
        counts["prompt_tokens"] += len(tokens)
        counts["hit_tokens"] += start
        for reason, count in record.misses.items():
            counts["miss_" + reason] += count
        if self._on_misses is not None:
            self._on_misses(start, record.misses)
        self._summary.maybe_log(counts, self.states, self.now())

    def _boundaries(self, req: Any, tokens: np.ndarray) -> tuple[int, ...]:
        """Positions of the prompt `tokens` that others will share: the end of its first message, what `req` names."""
        found = first_message(tokens, self._message_ends) if self._message_ends else ()
        given = getattr(req.sampling_params, "custom_params", None)
        if given is None:
            return found
        try:
            return tuple(sorted({*found, *named(given, len(tokens))}))
        except ConfigError as error:  # one that did not come through the HTTP process, which refuses it
            self.counts["bad_boundaries"] += 1
            logger.warning("request %s: %s", req.rid, error)
            return found

    def _use(self, record: Tracked, request: Request) -> None:
        """A request resumes: the state there is used, and may have turned out to be where others part."""
        start = request.cached_tokens
        node = self.cache.tree_core._node_arena.get(record.matched) if start else None
        if node is None or node.parent is None or end_tokens(node) != start:
            return
        held = getattr(node, "hybrid_mark", None)
        branch = self.decisions.branch(request, start, held)
        if branch is not None:
            node.hybrid_mark = held = branch
        if held is not None:
            self.decisions.resumed(request, held)
            self.victims.touch(node)
        for at in self.decisions.uses(request):
            used = node
            while used.parent is not None and end_tokens(used) > at:
                used = used.parent
            if end_tokens(used) == at and hasattr(used, "hybrid_mark"):
                self.decisions.touch(used.hybrid_mark)
                self.victims.touch(used)

    def fit(self, pool: Pool, count: int) -> None:
        """`count` tokens or states of `pool` have to leave the cache; of the other kind it may take what is free."""
        tokens, states = self.held()
        if pool is Pool.KV:
            self.decisions.fit(states + int(self.states.available_size()), max(0, tokens - count))
        else:
            free = int(self.cache.token_to_kv_pool_allocator.available_size())
            self.decisions.fit(max(0, states - count), tokens + free)

    def held(self) -> tuple[int, int]:
        """Tokens and states in the cache, in use or not."""
        cache = self.cache
        tokens = cache.full_evictable_size() + cache.full_protected_size()
        return int(tokens), int(cache.mamba_evictable_size() + cache.mamba_protected_size())

    def _reserve(self, record: Tracked, start: int, end: int, last: bool) -> None:
        assert record.request is not None
        places: dict[int, int] = {}
        for wanted in record.request.positions:
            at = reachable(wanted, start, end, self.grid, self.step)
            if at is not None:
                places[at] = wanted
        if last and self.cache.enable_mamba_extra_buffer:
            places.pop(start + (end - start) // self.grid * self.grid, None)  # SGLang saves that one by itself
        for at, wanted in sorted(places.items(), reverse=True):
            if not self.slots.reserve(record, at, wanted):
                self.counts["refused"] += 1
                mark = record.request.marks.get(wanted)
                if mark is not None:
                    mark.refused = True

    def found(self, node: Any, record: Tracked | None) -> None:
        """A request computed the state at `node` although it was there, saved by another one meanwhile."""
        mark = getattr(node, "hybrid_mark", None)
        if record is not None and record.request is not None and mark is not None:
            self.decisions.touch(mark)
            self.victims.touch(node)
            self.decisions.saved(record.request, [end_tokens(node)])

    def saved(self, node: Any, mark: Mark, record: Tracked | None) -> None:
        """A state was attached to `node`. An earlier end of the same request is superseded by it."""
        node.hybrid_mark = mark
        self.decisions.touch(mark)
        self.victims.touch(node)
        self.victims.touch_below(node)
        if self.tier is not None:
            self.tier.saved(node)
        if record is None or record.request is None:
            return
        self.decisions.saved(record.request, [end_tokens(node)])
        if mark is not record.request.tip:
            return
        earlier, record.tip_node = record.tip_node, node
        if earlier is None or earlier is node or earlier.parent is None:
            return
        old = self.decisions.superseded(earlier.hybrid_mark, mark.last_s)
        if old is not None:
            earlier.hybrid_mark = old
            self.victims.touch(earlier)

    def cached_tokens(self, record: Tracked) -> int:
        """How much of the request is in the cache before it ends."""
        node = record.tip_node
        return end_tokens(node) if node is not None and node.parent is not None else 0

    def finish(self, req: Any, record: Tracked, tokens: int, kept: int) -> None:
        """`req` ended after `tokens` tokens, the first `kept` of which are cached."""
        if record.request is None or record.finished:
            return
        assert record.prompt is not None
        sequence = np.concatenate((record.prompt, requests.ids(req.output_ids)))[:tokens]
        self.decisions.finish(record.request, sequence, self.now(), kept)
        record.finished, record.prompt = True, None

    def ended(self, req: Any, record: Tracked) -> None:
        """`req` gives its memory back. If it was aborted, what its last pass computed is not cached."""
        if req.finished():
            self.finish(req, record, record.start, record.start)
        self.decisions.computed(req.rid)

    def room_for(self, req: Any, ahead: list[Any]) -> bool:
        """Whether the states that `req` and those admitted `ahead` of it still need can be had."""
        short = sum([self.states_needed(r) for r in ahead]) + self.states_needed(req)
        short -= self.states.available_size() + len(self.slots)
        # What the request itself matched will be locked by then.
        return bool(short <= 0 or short < self.cache.mamba_evictable_size())

    def states_needed(self, req: Any) -> int:
        """State slots that `req` takes when it is admitted."""
        kv = state_of(req)
        pool = self.cache.req_to_token_pool
        need = 0 if kv.mamba_pool_idx is not None else 1
        need += need and bool(getattr(req, "mamba_host_hit_length", 0))  # what its match loads back
        if self.cache.enable_mamba_extra_buffer and kv.mamba_ping_pong_track_buffer is None:
            need += 1 if pool.enable_mamba_extra_buffer_lazy else pool.mamba_ping_pong_track_buffer_size
        return need

    def let_go(self, req: Any) -> None:
        """`req` goes on waiting: it must not keep the state slot it got when it was matched."""
        kv = state_of(req)
        if requests.streams(req):
            return  # its session's, from an earlier turn
        if kv.mamba_pool_idx is not None and kv.mamba_ping_pong_track_buffer is None and not req.output_ids:
            self.states.free(kv.mamba_pool_idx.view(-1))
            kv.mamba_pool_idx = kv.mamba_cow_src_index = None
            kv.mamba_needs_clear = False
            self.counts["waited_for_states"] += 1

    def has_state(self) -> bool:
        """Whether one more state slot can be had without evicting."""
        return bool(self.states.available_size() if self.capacity is None else self.capacity.holds_state())

    def ensure(self, count: int) -> bool:
        """Make `count` state slots free: evict, then take checkpoints in the making back. Whether it worked."""
        if self.capacity is not None:
            return bool(
                self.capacity.secure_states(count) or (self._reclaim(count) and self.capacity.secure_states(count))
            )
        short = count - self.states.available_size()
        if short > 0:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            self.cache.evict(EvictParams(num_tokens=0, mamba_num=short))
            short = count - self.states.available_size()
        if short > 0:
            self._reclaim(short)
            short = count - self.states.available_size()
        return short <= 0
