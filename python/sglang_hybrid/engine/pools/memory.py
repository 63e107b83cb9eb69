"""Who gets memory when it is short: the least valuable unreferenced bytes go, KV or state; nobody who runs is robbed.

A request is admitted when all it needs for its next pass is *held*: pages of both kinds, their memory mapped. So the
allocations of the pass cannot fail, whoever else takes memory of the machine meanwhile.
"""

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
from sglang_hybrid.memory.sizing import KV, STATE
from sglang_hybrid.prefix.pools import PoolKind

logger = logging.getLogger(__name__)

_EVERYTHING = 1 << 40
CHECKPOINTS = 2
"""States beyond its own that a pass may save; they are had if eviction can give them, and not waited for."""


class ElasticMemory(Memory):
    """One budget for both kinds: joins the arena of a process and the cache above it."""

    shared = True

    def __init__(self, parts: Parts, arena: Arena, spec: ModelSpec, telemetry: Telemetry) -> None:
        super().__init__(parts)
        self.arena = arena
        self.telemetry = telemetry
        self.promised = {KV: 0, STATE: 0}
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
        self.promised = {KV: 0, STATE: 0}

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
            self.arena.release_held()
            self._evict_for({KV: pages, STATE: self.states_needed(req) + CHECKPOINTS})

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
        need = {KV: self.promised[KV] + pages, STATE: self.promised[STATE] + states}
        with self._prefix_of(req):
            more = {**need, STATE: need[STATE] + CHECKPOINTS}
            held = self._secure(more) or self._secure(need)
        if held:
            self.promised = need
        else:
            self._counts["memory_waits"] += 1
        return held

    def has_state(self) -> bool:
        """Hold one state beside those promised to the pass if that evicts nothing; whether it is held."""
        return self.arena.shortfall({STATE: self.promised[STATE] + 1}) == 0 and self.arena.reserve(
            {STATE: self.promised[STATE] + 1}
        )

    def spare_states(self) -> bool:
        """Whether states may be taken that nobody asked for: free memory and unreferenced states are the measure.

        Memory is always full of something; such a state displaces the least valuable bytes, soon another of its kind.
        """
        states = self.arena.supplies[STATE]
        could = states.available + self.cache.mamba_evictable_size()
        return bool(could > states.pool.layout.slots // 8 + 4)

    def ensure_states(self, count: int) -> bool:
        """Evict, then take checkpoints in the making back, until `count` states beyond the promised ones are held."""
        return self._secure_states(count) or bool(self._reclaim(count) and self._secure_states(count))

    def leaving(self, pool: PoolKind, count: int) -> None:
        """What leaves was told in bytes already, by `_fit`."""

    def _secure_states(self, count: int) -> bool:
        """Hold `count` states beside those promised to the pass, evicting if need be; whether they are held."""
        states = self.arena.supplies[STATE]
        need = self.promised[STATE] + count
        if states.at_hand >= need and states.reserve(need):
            return True
        return self._secure({STATE: need, KV: len(self.arena.supplies[KV].held)})

    def secure_decode(self, pages: int) -> bool:
        """Hold `pages` of KV for the next step of the running requests, who have first claim to what is evictable."""
        self.arena.used()
        kv = self.arena.supplies[KV]
        if kv.at_hand >= pages and kv.reserve(pages):
            return True
        self.arena.supplies[STATE].release_held()
        return self._evict_for({KV: pages}) and self.arena.reserve({KV: pages})

    def make_room(self, pages: int) -> None:
        """Evict until `pages` of KV could be had, or nothing is left to evict."""
        if self.arena.supplies[KV].at_hand < pages:
            self._evict_for({KV: pages})

    def tokens_in_states(self) -> int:
        """Tokens of KV that would fit in place of the evictable states."""
        sizing = self.arena.sizing
        granules = self.cache.mamba_evictable_size() // sizing.states_per_column * sizing.state_column_granules
        return int(granules // sizing.kv_column_granules * sizing.kv_column_tokens)

    def release(self) -> int:
        """Evict everything nobody reads and give all unused memory back; granules given back."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=_EVERYTHING, mamba_num=_EVERYTHING))
        tokens, states = self.held()
        self.decisions.fit(states, tokens)
        return self.arena.release()

    def _secure(self, need: dict[str, int]) -> bool:
        for name, supply in self.arena.supplies.items():
            supply.release_held(need.get(name, 0))
        if self.arena.shortfall(need) != 0 and not (
            self.arena.possible(need, self._evictable()) and self._evict_for(need)
        ):
            return False
        return self.arena.reserve(need)

    def _evict_for(self, need: dict[str, int]) -> bool:
        """Evict one by one, the least valuable bytes first, until `need` fits.

        A kind that fills all of its addresses has to give some up itself: bytes of the other kind are no help.
        """
        while (short := self.arena.shortfall(need)) != 0:
            kinds = (KV, STATE) if short is not None else (self.arena.crowded(need),)
            freed_bytes, wanted_bytes = 0, (short or 1) * self.arena.sizing.granule_bytes
            self._fit(wanted_bytes)
            while freed_bytes < wanted_bytes:
                freed = self._evict_one(kinds)
                if not freed:
                    return False
                freed_bytes += freed
        return True

    def _fit(self, wanted_bytes: int) -> None:
        """Tell the decisions that `wanted_bytes` have to leave the cache."""
        (tokens, states), sizing, spec = self.held(), self.arena.sizing, self._spec
        held_bytes = tokens * sizing.kinds.token_bytes + states * sizing.state_slot_bytes
        stays = max(0.0, 1.0 - wanted_bytes / max(1, held_bytes))
        priced = tokens * spec.kv_bytes_per_token + states * spec.checkpoint_bytes  # of all ranks
        self.decisions.fit(held_bytes=int(priced * stays))

    def _evict_one(self, kinds: tuple[str, ...]) -> int:
        """Evict what is worth least per byte among `kinds`; bytes freed, 0 if nothing can go."""
        if len(kinds) == 2:
            kinds = self._kinds_of(self.victims.choose(self.cache.tree_core, self.now()))
        return next((freed for kind in kinds if (freed := self._evict(kind))), 0)

    def _kinds_of(self, node: Any) -> tuple[str, ...]:
        """In which order SGLang is asked for its kinds, so that `node` leaves."""
        return (KV, STATE) if node is None or node in self.cache.tree_core.evictable_device_leaves else (STATE, KV)

    def evict_chosen(self) -> float:
        """Memory changes its kind by whole columns: KV of less makes no room for a state, but counts as a part."""
        victims, sizing, free, freed = self.victims, self.arena.sizing, self.states.available_size(), 0
        nodes, victims.chosen = victims.chosen, []
        for node in nodes:
            victims.chosen = [node]
            self._fit(sizing.state_slot_bytes)
            freed += next((got for kind in self._kinds_of(node) if (got := self._evict(kind))), 0)
        part = freed / (sizing.state_column_granules * sizing.granule_bytes)
        return max(part, float(self.states.available_size() - free))

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

    def _evictable(self) -> dict[str, list[tuple[int, int]]]:
        """Pages of both kinds that nobody reads, by (column, how many)."""
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
