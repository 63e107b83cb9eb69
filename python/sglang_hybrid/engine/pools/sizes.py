"""How large the pools of a process are: SGLang asks for a split, we answer with the whole budget twice."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.device.cuda import CudaDriver
from sglang_hybrid.device.driver import Driver
from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine.pools import arena as arenas
from sglang_hybrid.engine.pools import ranks
from sglang_hybrid.engine.pools.memory import CHECKPOINTS
from sglang_hybrid.memory.sizing import Kinds, Sizing, choose

logger = logging.getLogger(__name__)

_CUDA_BASE_BYTES = 2 << 20
_HOST_BASE_BYTES = 4096


def request_states(original: Callable[..., int], configurator: Any, *args: Any, **kwargs: Any) -> int:
    """States a running request holds: its own and those it saves into. Memory, not a ratio, bounds the rest."""
    from sglang.srt.runtime_context import get_exec, get_schedule

    if not get_exec().mamba.enable_mamba_extra_buffer:
        return 1
    return 2 if get_schedule().disable_overlap_schedule else 3


def size_pools(_: Callable[..., float], configurator: Any, total_rest_gib: float) -> float:
    """AROUND hook of KVCacheConfigurator._handle_max_mamba_cache.

    Create the arena, tell SGLang how many states there may be, and return GiB for the tokens there may be.

    `total_rest_gib` is the memory SGLang found for both kinds, taken on a GPU; on a CPU the budget is configured.
    """
    from sglang.srt.runtime_context import get_context

    config, device = HybridConfig.from_environment(), torch.device(configurator.device)
    budget_bytes = config.cpu_memory_bytes if device.type == "cpu" else int(total_rest_gib * (1 << 30))
    if device.type != "cpu":
        logger.warning("elastic memory was not run on a GPU before; --hybrid-memory static is what was")
    base = _HOST_BASE_BYTES if device.type == "cpu" else _CUDA_BASE_BYTES
    need = request_states(lambda: 0, configurator) + CHECKPOINTS
    group = ranks.of_this_server()
    if group is not None:
        budget_bytes = group.least(budget_bytes)
    sizing = choose(kinds(configurator), budget_bytes, base, need)
    if group is not None:
        group.require_same("layout of memory (granules, bytes, tokens, states)",
                           (sizing.total, sizing.granule_bytes, sizing.tokens, sizing.states))  # fmt: skip
    arena = arenas.create(
        arenas.Arena(
            sizing, _driver(device, sizing), device, config.memory_idle_s, time.monotonic, time.thread_time, group
        )
    )
    arena.start_prefault(None if device.type == "cpu" else lambda: torch.cuda.set_device(_index(device)))
    get_context().override("mamba_pool.elastic", max_mamba_cache_size=sizing.states)
    token_bytes = sizing.kinds.kv_row_bytes * sizing.kinds.kv_planes
    logger.info(
        "elastic memory: %d granules of %d bytes; up to %d tokens or %d states",
        sizing.total, sizing.granule_bytes, sizing.tokens, sizing.states,
    )  # fmt: skip
    return (sizing.tokens + 0.5) * token_bytes / (1 << 30)


def kinds(configurator: Any) -> Kinds:
    """What one token and one state take in this process."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    model, layers = configurator.model_config, configurator.layer_info
    heads = model.get_num_kv_heads(get_parallel().attn_tp_size, get_parallel().attn_dcp_size)
    attention = [
        i for i in configurator.mambaish_config.full_attention_layer_ids if layers.start_layer <= i < layers.end_layer
    ]
    row_bytes = heads * model.head_dim * torch.empty(0, dtype=configurator.kv_cache_dtype).element_size()
    state_bytes = configurator.mambaish_config.mamba2_cache_params.mamba_cache_per_req
    return Kinds(row_bytes, 2 * len(attention), get_schedule().page_size, int(state_bytes))


def _driver(device: torch.device, sizing: Sizing) -> Driver:
    if device.type == "cpu":
        return HostDriver(sizing.total * sizing.granule_bytes, sizing.granule_bytes)
    return CudaDriver(_index(device))


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()
