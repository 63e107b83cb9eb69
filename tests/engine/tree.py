"""SGLang's unified radix cache over real pools on the CPU, without a server: for tests of the components alone."""

from __future__ import annotations

import os
import warnings
from array import array
from functools import cache
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine.cache.passes.prefill_states import PrefillStates
from sglang_hybrid.engine.hicache.copies import IO_BACKEND, LAYOUT
from sglang_hybrid.plugin import activate_platform
from tests.clock import LogicalClock

activate_platform()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang and what it imports warn about absent accelerators
    import sglang.srt.layers.attention.hybrid_linear_attn_backend
    import sglang.srt.mem_cache.unified_radix_cache  # noqa: F401
    import torch
    from sglang.srt.server_args import ServerArgs

SPEC = ModelSpec("pools", 256, 4096, 1000.0, 1.0)
GRID = 64


def publish(page_size: int, strategy: str, **more: Any) -> None:
    """Make SGLang's process-wide settings those of a scheduler."""
    arguments = ServerArgs(
        model_path="dummy", device="cpu", page_size=page_size, mamba_radix_cache_strategy=strategy, **more
    )
    arguments._mamba_cache_chunk_size = GRID
    try:
        from sglang.srt.server_args import set_global_server_args_for_scheduler as put
    except ImportError:
        from sglang.srt.runtime_context import publish as put_context

        put_context(arguments, role="scheduler")
    else:
        put(arguments)


@cache
def apply_cpu_hooks() -> None:
    """What a scheduler does at its start."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_hybrid.engine import cpu

    cpu.register_hooks()
    HookRegistry.apply_hooks()


class Tree:
    """A cache with `tokens` of KV and `states`; of a served `policy`, None is stock.

    With a `host_ratio` it has a host tier that many times as large. A row holds `context` tokens (0: all). `core` names
    another of SGLang's tree cores than the one that would be chosen. `events` are of "blocks" of KV, of "states" too.
    The `policy` "kv" is the cache of a server that decodes, which has no states. Victims are asked of the pools that a
    server with static memory has, and of `more_pools`.
    """

    def __init__(
        self, policy: str | None, tokens: int = 2048, states: int = 24, page_size: int = 1, host_ratio: float = 0.0,
        write_policy: str = "write_through", context: int = 0, core: str | None = None, events: str = "none",
        more_pools: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
        from sglang.srt.environ import envs
        from sglang.srt.mem_cache import allocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        from sglang_hybrid.engine.cache.checkpoint_slots import CheckpointSlots
        from sglang_hybrid.engine.cache.components import TYPES
        from sglang_hybrid.engine.cache.coordinator import CacheCoordinator, Rules
        from sglang_hybrid.engine.cache.memory import Parts, StaticMemory
        from sglang_hybrid.engine.cache.metrics import Account
        from sglang_hybrid.engine.cache.radix_cache import MambaRadixCache
        from sglang_hybrid.engine.cache.victims import Victims
        from sglang_hybrid.engine.hicache.tier import HostTier, TieredVictims
        from sglang_hybrid.engine.pairs.kv_cache import KvCache
        from sglang_hybrid.prefix.admission import Places
        from sglang_hybrid.prefix.decisions import Decisions
        from sglang_hybrid.prefix.pools import PoolKind

        extra = page_size > 1
        tier: dict[str, Any] = {}
        if host_ratio:
            tier = {"enable_hierarchical_cache": True, "hicache_ratio": host_ratio, "hicache_io_backend": IO_BACKEND}
            tier |= {"hicache_mem_layout": LAYOUT, "hicache_write_policy": write_policy}
        publish(page_size, "extra_buffer" if extra else "no_buffer", **tier)
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=2, head_dim=4, state_size=4, conv_kernel=4
        )
        with envs.SGLANG_MAMBA_SSM_DTYPE.override("float32"):
            costs = Mamba2CacheParams(shape=shape, layers=[0, 1])
        self.rows = HybridReqToTokenPool(
            size=8, mamba_size=states, mamba_spec_state_size=8, max_context_len=context or tokens, device="cpu",
            enable_memory_saver=False, cache_params=costs, mamba_layer_ids=[0, 1], enable_mamba_extra_buffer=extra,
        )  # fmt: skip
        kv = HybridLinearKVPool(
            size=tokens, dtype=torch.float32, page_size=page_size, head_num=1, head_dim=4,
            full_attention_layer_ids=[2], device="cpu", enable_memory_saver=False, mamba_pool=self.rows.mamba_pool,
        )  # fmt: skip
        common = {"dtype": torch.float32, "device": "cpu", "kvcache": kv, "need_sort": False}
        if extra:
            self.slots: Any = allocator.PagedTokenToKVPoolAllocator(size=tokens, page_size=page_size, **common)
        else:
            self.slots = allocator.TokenToKVPoolAllocator(size=tokens, **common)
        params = CacheInitParams(
            disable=False, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.slots, page_size=page_size,
            enable_kv_cache_events=events != "none",
        )  # fmt: skip
        params.tree_components = (TYPES["kv"],) if policy == "kv" else (TYPES["kv"], TYPES["state"])
        params.enable_mamba_extra_buffer = extra
        self.clock = LogicalClock()
        if core is not None:
            params.tree_core_backend = core

        def make_coordinator(cache: Any) -> CacheCoordinator:
            ours = policy != "lru"
            decisions = Decisions(SPEC, str(policy), where=Places(GRID if extra else 1), guarded=not host_ratio)
            pools = (PoolKind.STATES, PoolKind.KV, *more_pools)
            if host_ratio:
                pools += (PoolKind.HOST_STATES, PoolKind.HOST_KV)
            watched = TieredVictims if host_ratio else Victims
            victims = watched(decisions, TYPES["kv"], TYPES["state"], watches=ours, pools=pools)
            states = self.rows.mamba_allocator
            account = Account(states)
            parts = Parts(
                cache=cache, states=states, decisions=decisions, victims=victims, slots=CheckpointSlots(states),
                account=account, now=self.clock.now,
                tier=HostTier(cache, TYPES["state"], account.event) if host_ratio else None,
                events=state_events(cache) if events == "states" else None,
            )  # fmt: skip
            rules = Rules(grid=GRID if extra else 1, prefill=PrefillStates(GRID, "chunks"), scores=ours)
            return CacheCoordinator(parts, StaticMemory(parts), rules)

        self.cache: Any
        if policy == "kv":
            self.cache = KvCache(params)
        else:
            self.cache = UnifiedRadixCache(params) if policy is None else MambaRadixCache(params, make_coordinator)
        self.coordinator: CacheCoordinator | None = getattr(self.cache, "coordinator", None)
        self.kv = kv.full_kv_pool
        if host_ratio:
            apply_cpu_hooks()
            self.cache.init_hicache(None, params)
        self.types = TYPES
        self.page_size = page_size

    @property
    def core(self) -> Any:
        return self.cache.tree_core

    def key(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens), None)

    def match(self, tokens: list[int]) -> tuple[int, Any]:
        """Tokens that can be resumed from, and the node."""
        found = self.found(self.key(tokens))
        length = found.device_prefix_len if hasattr(found, "device_prefix_len") else len(found.device_indices)
        return int(length), found.last_device_node

    def found(self, key: Any) -> Any:
        """What SGLang's match of `key` says."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self.cache.match_prefix(MatchPrefixParams(key=key))

    def insert(self, tokens: list[int], key: Any = None) -> bool:
        """Insert a sequence with a state at its end; False where memory could not be had."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        if not self.make_room(len(tokens)):
            return False
        value, state = self.slots.alloc(len(tokens)), self.rows.mamba_allocator.alloc(1)
        done = self.cache.insert(InsertParams(key=key or self.key(tokens), value=value, mamba_value=state))
        if done.mamba_exist:
            self.rows.mamba_allocator.free(state)
        return True

    def evict(self, tokens: int, states: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=tokens, mamba_num=states))

    def make_room(self, tokens: int) -> bool:
        short = tokens - self.slots.available_size()
        states = 1 - self.rows.mamba_allocator.available_size()
        if short > 0 or states > 0:
            self.evict(max(0, short), max(0, states))
        return self.slots.available_size() >= tokens and self.rows.mamba_allocator.available_size() > 0

    def check(self) -> None:
        """Every container agrees with every other."""
        held, tokens = self.held()
        assert held + self.rows.mamba_allocator.available_size() == self.rows.mamba_allocator.size
        assert tokens + self.slots.available_size() == self.slots.size
        self.cache.sanity_check()
        if self.coordinator is not None and self.coordinator.scores:
            assert self.coordinator.victims.missing(self.core) == []
            self.coordinator.decisions.check()

    def held(self) -> tuple[int, int]:
        """States and tokens of KV in the tree."""
        cache = self.cache
        states = cache.mamba_evictable_size() + cache.mamba_protected_size()
        return int(states), int(cache.full_evictable_size() + cache.full_protected_size())


def state_events(cache: Any) -> Any:
    from sglang_hybrid.engine.cache.state_events import StateEvents  # not for 0.5.17

    return StateEvents(cache)


def compare_victims(tree: Any) -> list[Any]:
    """Ask the indices of every pool for a victim: scoring all of its candidates anew must give it too. The pools."""
    import numpy as np

    from sglang_hybrid.prefix.eviction.candidates import Candidates

    victims, decisions, core = tree.coordinator.victims, tree.coordinator.decisions, tree.core
    compared = []
    victims.sync(core)
    for pool in victims._known:
        nodes = [core._node_arena[i] for i in victims._known[pool]]
        if len(nodes) < 2:
            continue
        batch = Candidates.of(victims.price(core, pool, node) for node in nodes)
        expected = scores(decisions, pool, batch, tree.clock.now())
        chosen = victims.next(core, pool, tree.clock.now(), set())
        assert chosen is not None
        victims.touch(chosen)  # it stays
        mine = expected[[node.id for node in nodes].index(chosen.id)]
        assert mine <= np.min(expected) * (1 + 1e-9) + 1e-300
        compared.append(pool)
    return compared


def scores(decisions: Any, pool: Any, batch: Any, now: float) -> Any:
    """What the definition of the policy says of a batch of candidates of `pool`: the lowest leaves first."""
    from sglang_hybrid.prefix.decisions import priced
    from sglang_hybrid.prefix.eviction.forecast import Forecast

    if decisions.policy.tuner:
        return decisions.flop_aware.scores(batch, now)
    return Forecast(priced(decisions.model, pool), decisions.table).scores(batch, now)
