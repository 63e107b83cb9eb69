"""Elastic memory of a cache: what SGLang asks about requests, put to `memory.claims`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine.cache.hooks import coordinator_of, nobody_runs
from sglang_hybrid.engine.cache.memory import Memory, Parts
from sglang_hybrid.engine.pools.arena import Arena
from sglang_hybrid.engine.pools.evictable import EvictableColumns
from sglang_hybrid.engine.pools.telemetry import Telemetry
from sglang_hybrid.memory.claims import Claims
from sglang_hybrid.memory.sizing import KV, STATE
from sglang_hybrid.prefix.pools import PoolKind

logger = logging.getLogger(__name__)

_EVERYTHING = 1 << 40


class ElasticMemory(Claims, Memory):
    """One budget for both kinds: joins the arena of a process and the cache above it."""

    shared = True

    def __init__(self, parts: Parts, arena: Arena, spec: ModelSpec, telemetry: Telemetry) -> None:
        Memory.__init__(self, parts)
        Claims.__init__(self, arena)
        self.arena = arena
        self.telemetry = telemetry
        self._counts = parts.account.counts
        self._refusals_seen = 0
        self._adder: Any = None
        self._parked = False  # whether a chunk waits in this pass
        self._spec = spec
        page_tokens = {KV: arena.sizing.kinds.page_tokens, STATE: 1}
        self._evictables = {
            name: EvictableColumns(supply.pool, page_tokens[name]) for name, supply in arena.supplies.items()
        }

    def begin_pass(self) -> None:
        """Nothing is admitted yet."""
        self.arena.used()
        if self.arena.ranks is not None:
            self.arena.release_held()
        self.nothing_promised()

    def just_refused(self) -> bool:
        """Whether anybody had to wait since this was asked last."""
        seen, self._refusals_seen = self._refusals_seen, self._counts["memory_waits"]
        return self._refusals_seen > seen

    def room_for(self, adder: Any, req: Any) -> bool:
        """Whether `req` may start, as far as memory goes; then what its first pass needs is held."""
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        self._meet(adder)
        if self._parked:
            return False
        tokens = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        new = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
        if tokens + new + adder.page_size >= adder.rem_total_tokens:  # SGLang's forecast of running requests
            if adder.can_run_list or not nobody_runs(adder):
                return False
            self._clear_for(_pages(tokens + new, adder.page_size), req)
        if self.tier is not None and _restores(req):
            if self._admit(self._first_pages(adder, tokens, req.host_hit_length), self.states_needed(req), req):
                return True
            self.tier.give_up(req)
        return self._admit(self._first_pages(adder, tokens, 0), self.states_needed(req), req)

    @staticmethod
    def _first_pages(adder: Any, tokens: int, restored: int) -> int:
        """Pages of a first pass: `restored` of the `tokens` are loaded back, a chunk of the rest computed."""
        chunk = tokens - restored
        if adder.rem_chunk_tokens is not None:
            chunk = min(chunk, max(0, adder.rem_chunk_tokens))
        return _pages(restored + chunk, adder.page_size)

    @contextmanager
    def restoring(self, req: Any, page_size: int) -> Iterator[None]:
        """What SGLang loads back for `req` meanwhile is no longer promised to it."""
        if self.tier is None:
            yield
            return
        tokens, states = len(req.prefix_indices), self.states_needed(req)
        yield
        self.promised[KV] -= -(-(len(req.prefix_indices) - tokens) // page_size)
        self.promised[STATE] -= states - self.states_needed(req)

    def room_for_chunk(self, adder: Any, req: Any) -> bool:
        """Whether the next chunk of `req`, which has its states, may run; then its pages are held.

        If not, nobody else is admitted in this pass: SGLang would count it as one of the chunk's, take the last chunk
        for one in the middle, and lose the first token of the answer.
        """
        self._meet(adder)
        tokens = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        pages = _pages(min(tokens, adder.rem_chunk_tokens), adder.page_size)
        self._parked = not self._admit(pages, 0, req)
        return not self._parked

    def _meet(self, adder: Any) -> None:
        if adder is not self._adder:  # SGLang makes one per pass
            self._adder, self._parked = adder, False
            self.begin_pass()

    def _clear_for(self, pages: int, req: Any) -> None:
        """Evict for all of a request that has the machine to itself: forecasts of evictable memory are coarse."""
        with self._prefix_of(req):
            self.clear_for(pages, self.states_needed(req))

    @contextmanager
    def _prefix_of(self, req: Any) -> Iterator[None]:
        """Nothing that `req` resumes from is evicted meanwhile, from either tier."""
        cache = self.cache
        locked = cache.inc_lock_ref(req.last_node)
        backed = cache.inc_host_lock_ref(req.best_match_node) if _restores(req) else None
        try:
            yield
        finally:
            if backed is not None:
                cache.dec_host_lock_ref(req.best_match_node, backed.to_dec_params())
            cache.dec_lock_ref(req.last_node, locked.to_dec_params())

    def _admit(self, pages: int, states: int, req: Any) -> bool:
        """Hold what one more request of this pass needs, all of it or nothing."""
        with self._prefix_of(req):
            held = self.admit(pages, states)
        self._counts["memory_waits"] += not held
        return held

    def ensure_states(self, count: int) -> bool:
        """Evict, then take checkpoints in the making back, until `count` states beyond the promised ones are held."""
        return self.secure_states(count) or bool(self._reclaim(count) and self.secure_states(count))

    def leaving(self, pool: PoolKind, count: int) -> None:
        """What leaves was told in bytes already, by `fit`."""

    def secure_decode(self, pages: int) -> bool:
        self.arena.used()
        return super().secure_decode(pages)

    def held(self) -> tuple[int, int]:
        return Memory.held(self)

    def evictable_states(self) -> int:
        return int(self.cache.mamba_evictable_size())

    def leave(self, share: float) -> None:
        (tokens, states), spec = self.held(), self._spec
        priced = tokens * spec.kv_bytes_per_token + states * spec.checkpoint_bytes  # of all ranks
        self.decisions.fit(held_bytes=int(priced * share))

    def release(self) -> int:
        """Evict everything nobody reads and give all unused memory back; granules given back."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=_EVERYTHING, mamba_num=_EVERYTHING))
        tokens, states = self.held()
        self.decisions.fit(states, tokens)
        return self.arena.release()

    def evict_one(self, kinds: tuple[str, ...]) -> int:
        if len(kinds) == 2:
            kinds = self._kinds_of(self.victims.choose(self.cache.tree_core, self.now()))
        return next((freed for kind in kinds if (freed := self._evict(kind))), 0)

    def _kinds_of(self, node: Any) -> tuple[str, ...]:
        """In which order SGLang is asked for its kinds, so that `node` leaves."""
        return (KV, STATE) if node is None or node in self.cache.tree_core.evictable_device_leaves else (STATE, KV)

    def evict_chosen(self) -> float:
        victims, free, freed = self.victims, self.states.available_size(), 0
        nodes, victims.chosen = victims.chosen, []
        for node in nodes:
            victims.chosen = [node]
            self.fit(self.arena.sizing.state_slot_bytes)
            freed += next((got for kind in self._kinds_of(node) if (got := self._evict(kind))), 0)
        return self.room_made(freed, float(self.states.available_size() - free))

    def _evict(self, kind: str) -> int:
        """Evict one victim of `kind`; bytes freed."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        taken = self._taken_bytes()
        tokens, states = (1, 0) if kind == KV else (0, 1)
        self.cache.evict(EvictParams(num_tokens=tokens, mamba_num=states))
        freed = taken - self._taken_bytes()
        self._counts[f"memory_evicted_{kind}"] += freed > 0
        return freed

    def _taken_bytes(self) -> int:
        sizing, supplies = self.arena.sizing, self.arena.supplies
        kv_page_bytes = sizing.kinds.token_bytes * sizing.kinds.page_tokens
        return int(supplies[KV].taken * kv_page_bytes + supplies[STATE].taken * sizing.state_slot_bytes)

    def evictable(self) -> dict[str, list[tuple[int, int]]]:
        tokens, states = self.victims.unlocked(self.cache.tree_core)
        return {KV: self._evictables[KV].follow(tokens), STATE: self._evictables[STATE].follow(states)}


def memory_of(cache: Any) -> ElasticMemory:
    """The memory of `cache`, which was built as ours: whoever asks is there only with elastic memory."""
    coordinator = coordinator_of(cache)
    if coordinator is None or not isinstance(coordinator.memory, ElasticMemory):
        raise InvariantError(f"elastic pools under a cache without elastic memory: {type(cache).__name__}")
    return coordinator.memory


def _restores(req: Any) -> bool:
    """Whether the match of `req` reaches into the host tier."""
    return bool(getattr(req, "host_hit_length", 0) or getattr(req, "mamba_host_hit_length", 0))


def _pages(tokens: int, page_size: int) -> int:
    """Pages for `tokens` more of a request, as SGLang estimates it: one more than they fill."""
    return -(-tokens // page_size) + 1
