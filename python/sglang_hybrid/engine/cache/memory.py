"""Who gets memory of a cache's pools: may a request start, can one more state slot be had, what may leave for it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_hybrid.engine.cache.checkpoint_slots import CheckpointSlots
from sglang_hybrid.engine.cache.metrics import Account
from sglang_hybrid.engine.cache.victims import Victims
from sglang_hybrid.engine.compat import state_of
from sglang_hybrid.engine.hicache.tier import HostTier
from sglang_hybrid.prefix.decisions import Decisions
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.pools import PoolKind

if TYPE_CHECKING:
    from sglang_hybrid.engine.cache.state_events import StateEvents


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the memory and the coordinator of one cache share.

    `cache` is SGLang's, whose tree does not exist yet while these are put together; `states` is SGLang's allocator of
    state slots; `now` gives seconds, the same on every rank.
    """

    cache: Any
    states: Any
    decisions: Decisions
    victims: Victims
    slots: CheckpointSlots
    account: Account
    now: Callable[[], float]
    tier: HostTier | None = None
    events: StateEvents | None = None


class Memory(ABC):
    """The interface of `--hybrid-memory`: `StaticMemory` here, `ElasticMemory` in engine/pools."""

    shared: bool
    """Whether KV and states share bytes, so that either kind may leave for the other."""

    def __init__(self, parts: Parts) -> None:
        self.cache = parts.cache
        self.states = parts.states
        self.decisions = parts.decisions
        self.victims = parts.victims
        self.slots = parts.slots
        self.account = parts.account
        self.now = parts.now
        self.tier = parts.tier

    @abstractmethod
    def room_for(self, adder: Any, req: Any) -> bool:
        """Whether `req`, behind those that `adder` admitted already, can have what it needs to start."""

    granted_tokens: int = 1 << 40
    """Tokens of KV that the request may take which was let in last."""

    def room_for_chunk(self, adder: Any, req: Any) -> bool:
        """Whether `req`, whose prompt is in chunks, can have what its next chunk needs."""
        return True

    def kept(self, req: Any) -> AbstractContextManager[None]:
        """What `req` resumes from does not leave for anything inside."""
        return nullcontext()

    def yielded(self, contenders: dict[int, Candidate]) -> bool:
        """Evict one thing that is in no tree, if it is worth less than what is and than all `contenders`; whether."""
        return False

    @abstractmethod
    def restoring(self, req: Any, page_size: int) -> AbstractContextManager[None]:
        """SGLang admits `req` inside, and loads back what it matched in host memory."""

    def free_states(self) -> int:
        """State slots that can be had without evicting."""
        return int(self.states.available_size())

    @abstractmethod
    def has_state(self) -> bool:
        """Whether one more state slot can be had without evicting."""

    @abstractmethod
    def spare_states(self) -> bool:
        """Whether states may be taken that nobody asked for."""

    @abstractmethod
    def ensure_states(self, count: int) -> bool:
        """Make `count` state slots free: evict, then take checkpoints in the making back. Whether it worked."""

    @abstractmethod
    def evict_chosen(self) -> float:
        """Evict all that `victims.weakest` chose; how many states have room in the memory that came free."""

    def contest(self, contenders: dict[int, Candidate]) -> set[int]:
        """Those of the `contenders`, states that a pass is to save, for which there is a slot.

        What is cached and worth less than any of them is evicted. Where they are worth less, they go without.
        """
        left = dict(contenders)
        pool = PoolKind.BYTES if self.shared else PoolKind.STATES
        missing = float(len(left) - self.free_states())
        while missing > 0 and left:
            if self.yielded(left):
                missing = len(left) - self.free_states()
                continue
            for lost in self.victims.weakest(self.cache.tree_core, pool, left, math.ceil(missing), self.now()):
                del left[lost]
                missing -= 1
            if self.victims.chosen:
                freed = self.evict_chosen()
                if not freed:
                    break
                missing -= freed
        return set(left)

    @abstractmethod
    def leaving(self, pool: PoolKind, count: int) -> None:
        """SGLang begins to evict `count` tokens or states of `pool`."""

    def held(self) -> tuple[int, int]:
        """Tokens and states in the cache, in use or not."""
        cache = self.cache
        tokens = cache.full_evictable_size() + cache.full_protected_size()
        return int(tokens), int(cache.mamba_evictable_size() + cache.mamba_protected_size())

    def states_needed(self, req: Any) -> int:
        """State slots that `req` takes when it is admitted."""
        kv = state_of(req)
        pool = self.cache.req_to_token_pool
        need = 0 if kv.mamba_pool_idx is not None else 1
        need += need and bool(getattr(req, "mamba_host_hit_length", 0))  # what its match loads back
        if self.cache.enable_mamba_extra_buffer and kv.mamba_ping_pong_track_buffer is None:
            need += 1 if pool.enable_mamba_extra_buffer_lazy else pool.mamba_ping_pong_track_buffer_size
        return need

    def let_go(self, req: Any) -> bool:
        """`req` goes on waiting: it must not keep the state slot it got when it was matched. Whether it had one.

        A slot that comes with a row of KV is its session's, from an earlier turn.
        """
        kv = state_of(req)
        if kv.mamba_pool_idx is None or kv.req_pool_idx is not None:
            return False
        self.states.free(kv.mamba_pool_idx.view(-1))
        kv.mamba_pool_idx = kv.mamba_cow_src_index = None
        kv.mamba_needs_clear = False
        return True

    def complete(self, tokens: int, states: int) -> None:  # noqa: B027
        """An allocation needs `tokens` of KV and `states` free slots, and the tree has given what it could.

        Where all that is admitted has its memory already there is nothing to do.
        """

    def _reclaim(self, count: int) -> int:
        """Take back up to `count` slots of checkpoints in the making; returns how many."""
        taken = self.slots.reclaim(count)
        self.account.event("reclaimed", taken)
        return taken


class StaticMemory(Memory):
    """SGLang's two pools of fixed sizes. It sees to KV itself; where states run out it would end in an assertion."""

    shared = False

    def room_for(self, adder: Any, req: Any) -> bool:
        short = sum([self.states_needed(r) for r in adder.can_run_list]) + self.states_needed(req)
        short -= self.states.available_size() + len(self.slots)
        # What the request itself matched will be locked by then.
        return bool(short <= 0 or short < self.cache.mamba_evictable_size())

    @contextmanager
    def restoring(self, req: Any, page_size: int) -> Iterator[None]:
        if self.tier is not None:
            self.tier.secure(self, req)
        yield

    def free_states(self) -> int:
        """SGLang's unified pool (`--enable-unified-memory`) has more slots than memory, which KV may have taken.

        What requests need to run SGLang evicts for itself there, KV too; they are admitted by slots.
        """
        return int(self.states.schedulable_available_size())

    def has_state(self) -> bool:
        return bool(self.states.available_size())

    def spare_states(self) -> bool:
        """An eighth of the pool and four slots are free."""
        return bool(self.free_states() > self.states.size // 8 + 4)

    def ensure_states(self, count: int) -> bool:
        short = count - self.states.available_size()
        if short > 0:
            self._evict(0, short)
            short = count - self.states.available_size()
        if short > 0:
            self._reclaim(short)
            short = count - self.states.available_size()
        return short <= 0

    def complete(self, tokens: int, states: int) -> None:
        """Those of checkpoints in the making are given too, as `room_for` has promised; then what was being copied.

        SGLang ends over an allocation that fails, and gives up an answer that nobody else could make room for.
        """
        short = states - int(self.states.available_size())
        if short > 0:
            self._reclaim(short)
        missing = tokens - self._free_tokens(), states - int(self.states.available_size())
        if max(missing) > 0 and self.tier is not None and self.tier.copied():
            self._evict(*missing)

    def _free_tokens(self) -> int:
        return int(self.cache.token_to_kv_pool_allocator.available_size())

    def _evict(self, tokens: int, states: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=max(0, tokens), mamba_num=max(0, states)))

    def evict_chosen(self) -> float:
        free = self.free_states()
        self._evict(0, len(self.victims.chosen))
        return float(self.free_states() - free)

    def leaving(self, pool: PoolKind, count: int) -> None:
        """Of the other kind the cache may take what is free."""
        tokens, states = self.held()
        if pool is PoolKind.KV:
            self.decisions.fit(states + self.free_states(), max(0, tokens - count))
        else:
            self.decisions.fit(max(0, states - count), tokens + self._free_tokens())
