"""How large the pools of a process are: SGLang asks for a split, we answer with the whole budget twice."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.segments import segment_costs
from sglang_hybrid.core.spec import engine_dtypes, from_config
from sglang_hybrid.device.cuda import CudaDriver
from sglang_hybrid.device.driver import Driver
from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine.pools import arena as arenas
from sglang_hybrid.engine.pools import ranks
from sglang_hybrid.engine.segments.room import Needs, most_granules
from sglang_hybrid.engine.speculation.checks import candidate_bytes
from sglang_hybrid.memory.claims import CHECKPOINTS
from sglang_hybrid.memory.sizing import CUDA, HOST, Kinds, Sizing, choose

logger = logging.getLogger(__name__)


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

    config, device = HybridConfig.from_environment(), device_of(configurator)
    budget_bytes = config.cpu_memory_bytes if device.type == "cpu" else int(total_rest_gib * (1 << 30))
    if device.type != "cpu":
        logger.warning("elastic memory on a GPU was seen on one H200 and small models only; see docs/gpu.md")
    grain = HOST if device.type == "cpu" else CUDA
    need = request_states(lambda: 0, configurator) + CHECKPOINTS
    budget_bytes -= _verified_bytes(configurator)
    group = ranks.of_this_server()
    if group is not None:
        budget_bytes = group.least(budget_bytes)
    sizing = choose(kinds(configurator), budget_bytes, grain, need)
    if config.segments == "on":
        sizing = beside_segments(sizing, configurator, config)
    if group is not None:
        group.require_same("layout of memory (granules, bytes, tokens, states)",
                           (sizing.total, sizing.granule_bytes, sizing.tokens, sizing.states))  # fmt: skip
    driver = _driver(device, sizing)
    arena = arenas.create(
        arenas.Arena(sizing, driver, device, config.memory_idle_s, time.monotonic, time.thread_time, group)
    )
    arena.start_prefault()
    get_context().override("mamba_pool.elastic", max_mamba_cache_size=sizing.states)
    logger.info(
        "elastic memory: %d granules of %d bytes; up to %d tokens or %d states",
        sizing.total, sizing.granule_bytes, sizing.tokens, sizing.states,
    )  # fmt: skip
    return (sizing.tokens + 0.5) * sglangs_token_bytes(configurator, sizing.kinds) / (1 << 30)


def beside_segments(sizing: Sizing, configurator: Any, config: HybridConfig) -> Sizing:
    """`sizing` with what a request may rely on beside its KV and states: one segment at which a pass of it ended."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    model = from_config(configurator.model_config.hf_config.to_dict(), **engine_dtypes(os.environ))
    costs = segment_costs(model.per_rank(get_parallel().tp_size), config.segment_dtype)
    chunk = get_schedule().chunked_prefill_size
    most = min(sizing.tokens, chunk if chunk and chunk > 0 else sizing.tokens)
    token_bytes = max(costs.token_bytes, sizing.kinds.token_bytes)
    needs = Needs(costs.state_bytes, token_bytes, costs.transitions, costs.transition_bytes)
    granules = most_granules(needs, most, sizing.granule_bytes)
    found = replace(sizing, reserved=granules)
    if found.tokens < found.kinds.page_tokens or found.states < found.request_states:
        raise ConfigError(
            f"the budget does not hold one request beside a segment of {most} tokens; raise it "
            f"(--hybrid-cpu-memory-gb on a CPU) or lower --chunked-prefill-size: {sizing.total_bytes:,}"
        )
    return found


def device_of(configurator: Any) -> torch.device:
    """Where the pools of this rank lie, a GPU with its index: tensors, driver and threads must mean the same one."""
    device = torch.device(configurator.device)
    return device if device.type == "cpu" else torch.device(device.type, configurator.gpu_id)


def kinds(configurator: Any) -> Kinds:
    """What one token and one state take in this process. What drafts keeps its KV in the same pages, in more planes."""
    from sglang.srt.runtime_context import get_parallel, get_schedule

    model = configurator.model_config
    if configurator.use_mla_backend:  # every rank keeps the whole latent
        planes, width = 1, model.kv_lora_rank + model.qk_rope_head_dim
    else:
        heads = model.get_num_kv_heads(get_parallel().attn_tp_size, get_parallel().attn_dcp_size)
        planes, width = 2, heads * model.head_dim
    layers = _attention_layers(configurator) + draft_layers(configurator)
    return Kinds(
        width * configurator.kv_cache_dtype.itemsize,
        planes * layers,
        get_schedule().page_size,
        _state_bytes(configurator),
    )


def draft_layers(configurator: Any) -> int:
    """Attention layers of the model that drafts, 0 where none does; one of a head that its configuration leaves out."""
    algorithm = configurator.spec_algorithm
    if not (algorithm.is_eagle() or algorithm.is_standalone()):
        return 0
    return int(configurator.spec_aux_config.eagle_draft_num_layers or 1)


def _verified_bytes(configurator: Any) -> int:
    """States of what is verified, for as many requests as may run."""
    from sglang.srt.runtime_context import get_schedule, max_speculative_num_draft_tokens

    if configurator.spec_algorithm.is_none():
        return 0
    tokens, requests = max_speculative_num_draft_tokens(), get_schedule().max_running_requests
    return candidate_bytes(int(tokens), int(requests), _state_bytes(configurator))


def sglangs_token_bytes(configurator: Any, kinds: Kinds) -> int:
    """By what SGLang divides to get tokens: it leaves out a head of which its configuration says nothing."""
    attention, drafts = _attention_layers(configurator), draft_layers(configurator)
    counted = int(configurator.spec_aux_config.eagle_draft_num_layers or 0) if drafts else 0
    return kinds.token_bytes * (attention + counted) // (attention + drafts)


def _attention_layers(configurator: Any) -> int:
    layers = configurator.layer_info
    return sum(
        layers.start_layer <= i < layers.end_layer for i in configurator.mambaish_config.full_attention_layer_ids
    )


def _state_bytes(configurator: Any) -> int:
    return int(configurator.mambaish_config.mamba2_cache_params.mamba_cache_per_req)


def _driver(device: torch.device, sizing: Sizing) -> Driver:
    if device.type == "cpu":
        return HostDriver(sizing.total * sizing.granule_bytes, sizing.granule_bytes)
    return CudaDriver(
        device.index,
        reclaim=lambda: _uncache(device),
        stream=lambda: int(torch.cuda.current_stream(device).cuda_stream),
    )


def _uncache(device: torch.device) -> bool:
    """Have torch give back the memory that it keeps from the largest batch so far; whether it had any.

    Static pools take theirs before the first batch. The budget leaves torch what it needs at most, not what it keeps.
    """
    before = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) < before
