"""Elastic memory of a cache: what SGLang asks about requests, put to `memory.claims`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.hooks import coordinator_of, nobody_runs
from sglang_hybrid.engine.cache.memory import Memory, Parts
from sglang_hybrid.engine.pools.arena import Arena
from sglang_hybrid.engine.pools.evictable import EvictableColumns
from sglang_hybrid.engine.pools.telemetry import Telemetry
from sglang_hybrid.memory.claims import Claims
from sglang_hybrid.memory.sizing import KV, SEGMENT, STATE
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.pools import PoolKind

if TYPE_CHECKING:
    from sglang_hybrid.engine.segments.composer import Composer

logger = logging.getLogger(__name__)

_EVERYTHING = 1 << 40


class ElasticMemory(Claims, Memory):
    """One budget for all kinds: joins the arena of a process and the cache above it.

    To segments the cache is their rival (`segment.index.Rivals`), once `share` was called.
    """

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
        self._continued: Any = None  # whose next chunk was asked for in this pass
        self._composer: Composer | None = None
        self._spec = spec
        page_tokens = {KV: arena.sizing.kinds.page_tokens, STATE: 1}
        self._evictables = {
            name: EvictableColumns(supply.pool, page_tokens[name]) for name, supply in arena.supplies.items()
        }

    def segment_limit(self, config: HybridConfig) -> int:
        """Bytes for which segments have addresses."""
        total = self.arena.sizing.total * self.arena.sizing.granule_bytes
        return min(total, config.segment_bytes) if config.segment_memory_gb else total

    def share(self, composer: Composer) -> None:
        """The segments of `composer` are in the same budget."""
        self._composer = composer

    def begin_pass(self) -> None:
        """Nothing is admitted yet."""
        self.arena.used()
        if self._composer is not None:
            self._counts["memory_evicted_segment"] = self._composer.index.counts.evicted
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
        tokens = len(req.full_untruncated_fill_ids) - compat.prefix_tokens(req)
        new = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
        if tokens + new + adder.page_size >= adder.rem_total_tokens:  # SGLang's forecast of running requests
            if adder.can_run_list or not nobody_runs(adder):
                return False
            self._clear_for(_pages(tokens + new, adder.page_size), req)
        if self.tier is not None and _restores(req):
            restored = int(req.host_hit_length)
            pages = _pages(restored + _chunk(adder, tokens - restored), adder.page_size)
            if self._hold(pages, self.states_needed(req), req):
                return True
            self._counts["memory_waits"] += 1
            self.tier.give_up(req)
        return self._grant(adder, req, tokens, _chunk(adder, tokens), self.states_needed(req))

    def _grant(self, adder: Any, req: Any, tokens: int, chunk: int, states: int) -> bool:
        """Hold KV for the next pass of `req`, which has `tokens` left and runs a `chunk`.

        With segments a pass goes further. If there is no memory for all that it might copy, it ends where others do.
        """
        prompt = None if self._composer is None else self._composer.prompt(req)
        reach = chunk if prompt is None else min(tokens, prompt.reach(compat.prefix_tokens(req), chunk))
        for granted in dict.fromkeys((reach, chunk)):
            if self._hold(_pages(granted, adder.page_size), states, req):
                self.granted_tokens = granted
                return True
        self._counts["memory_waits"] += 1
        return False

    @contextmanager
    def restoring(self, req: Any, page_size: int) -> Iterator[None]:
        """What SGLang loads back for `req` meanwhile is no longer promised to it."""
        if self.tier is None:
            yield
            return
        tokens, states = compat.prefix_tokens(req), self.states_needed(req)
        yield
        self.promised[KV] -= -(-(compat.prefix_tokens(req) - tokens) // page_size)
        self.promised[STATE] -= states - self.states_needed(req)

    def room_for_chunk(self, adder: Any, req: Any) -> bool:
        """Whether the next chunk of `req`, which has its states, may run; then its pages are held.

        If not, nobody else is admitted in this pass: SGLang would count it as one of the chunk's, take the last chunk
        for one in the middle, and lose the first token of the answer.
        """
        self._meet(adder)
        if self._continued is not req:  # with segments two hooks ask
            self._continued = req
            tokens = len(req.full_untruncated_fill_ids) - compat.prefix_tokens(req)
            self._parked = not self._grant(adder, req, tokens, min(tokens, adder.rem_chunk_tokens), 0)
        return not self._parked

    def kept(self, req: Any) -> AbstractContextManager[None]:
        return self._prefix_of(req)

    def _meet(self, adder: Any) -> None:
        if adder is not self._adder:  # SGLang makes one per pass
            self._adder, self._parked, self._continued = adder, False, None
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

    def _hold(self, pages: int, states: int, req: Any) -> bool:
        """Hold what one more request of this pass needs, all of it or nothing."""
        with self._prefix_of(req):
            return self.admit(pages, states)

    def ensure_states(self, count: int) -> bool:
        """Evict, then take checkpoints in the making back, until `count` states beyond the promised ones are held."""
        return self.secure_states(count) or bool(self._reclaim(count) and self.secure_states(count))

    def leaving(self, pool: PoolKind, count: int) -> None:
        """What leaves was told in bytes already, by `fit`."""

    def secure_decode(self, pages: int) -> bool:
        """Those that run come first: checkpoints in the making, which the tree has not got yet, are taken back."""
        self.arena.used()
        if super().secure_decode(pages) or (self._all_ran() and super().secure_decode(pages)):
            return True
        if self.tier is not None and self.tier.copied() and super().secure_decode(pages):
            return True
        while self._reclaim(self.arena.sizing.states_per_column):
            if super().secure_decode(pages):
                return True
        return False

    def _all_ran(self) -> bool:
        """Wait for the passes that run; whether segments were kept for them."""
        if self._composer is None or self._composer.leases is None:
            return False
        if self.arena.device.type == "cuda":
            torch.cuda.synchronize(self.arena.device)
        return self._composer.leases.ran()

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
        if self._composer is not None:
            for entry in [each for each in self._composer.index if not each.pins]:
                self._composer.index.drop(entry)
            self._composer.tell()
        return self.arena.release()

    def evict_one(self, kinds: tuple[str, ...]) -> int:
        if len(kinds) == 1:
            return self._evict(kinds[0])
        if self._composer is None:
            return self._evict_cached()
        least = self.least(self.now())
        return self._yield(math.inf if least is None else least) or self._evict_cached() or self._yield(math.inf)

    def _evict_cached(self) -> int:
        """Evict what is worth least per byte of KV and states; bytes freed."""
        kinds = self._kinds_of(self.victims.choose(self.cache.tree_core, self.now()))
        freed = next((freed for kind in kinds if (freed := self._evict(kind))), 0)
        if freed and self._composer is not None:
            self.leave(1.0)  # the cache holds so much less now
        return freed

    def _yield(self, worth: float) -> int:
        """Evict the segment that is worth least, if that is no more than `worth` per byte; bytes freed."""
        return 0 if self._composer is None else self._composer.index.give_way(worth, self.now())

    def least(self, now: float) -> float | None:
        """See Rivals: what `forecast` would say of the cache's next victim, whatever the order is."""
        node = self.victims.choose(self.cache.tree_core, now)
        self.victims.chosen = []  # nothing is evicted yet
        return None if node is None else self._worth(node, now)

    def _worth(self, node: Any, now: float) -> float:
        return self.decisions.worth(self.victims.price(self.cache.tree_core, PoolKind.BYTES, node), now)

    def evict(self) -> bool:
        """See Rivals."""
        return self._evict_cached() > 0

    def yielded(self, contenders: dict[int, Candidate]) -> bool:
        if self._composer is None:
            return False
        now = self.now()
        least = self.least(now)
        worths = [self.decisions.worth(each, now) for each in contenders.values()]
        return self._yield(min(worths if least is None else [*worths, least])) > 0

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
        found = {KV: self._evictables[KV].follow(tokens), STATE: self._evictables[STATE].follow(states)}
        if self._composer is not None:
            blocks = np.array(self._composer.index.unpinned_blocks(), dtype=np.int64)
            found[SEGMENT] = list(self.arena.supplies[SEGMENT].pool.count_by_column(blocks))
        return found

    def evictable_blocks(self) -> int:
        return 0 if self._composer is None else len(self._composer.index.unpinned_blocks())


def memory_of(cache: Any) -> ElasticMemory:
    """The memory of `cache`, which was built as ours: whoever asks is there only with elastic memory."""
    coordinator = coordinator_of(cache)
    if coordinator is None or not isinstance(coordinator.memory, ElasticMemory):
        raise InvariantError(f"elastic pools under a cache without elastic memory: {type(cache).__name__}")
    return coordinator.memory


def _restores(req: Any) -> bool:
    """Whether the match of `req` reaches into the host tier."""
    return bool(getattr(req, "host_hit_length", 0) or getattr(req, "mamba_host_hit_length", 0))


def _chunk(adder: Any, tokens: int) -> int:
    """How many of a new request's `tokens` its first pass computes."""
    return tokens if adder.rem_chunk_tokens is None else min(tokens, max(0, adder.rem_chunk_tokens))


def _pages(tokens: int, page_size: int) -> int:
    """Pages for `tokens` more of a request, as SGLang estimates it: one more than they fill."""
    return -(-tokens // page_size) + 1
