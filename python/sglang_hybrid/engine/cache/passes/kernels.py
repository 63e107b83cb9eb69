"""The two kernel operations the cache uses: copies of states between slots, and states at positions inside a chunk.

`SGLANG_HYBRID_KERNELS` chooses: `auto` takes ours on a CPU and SGLang's own on a GPU, where ours were run on one H200;
`triton` and `naive` take ours everywhere. Positions inside a chunk are then had for delta-rule layers; elsewhere the
state at the start of the chunk serves instead.
"""

from __future__ import annotations

from typing import Any

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.passes import forward
from sglang_hybrid.engine.cache.passes.prefill_states import is_by_channel, linear_backend
from sglang_hybrid_kernels import dispatch


def ours(device_type: str) -> bool:
    """Whether our operations run for tensors on `device_type`."""
    return device_type == "cpu" or dispatch.mode() != "auto"


def describe(device_type: str) -> str:
    """One line for the log."""
    if not ours(device_type):
        return f"SGLang's own; {dispatch.VARIABLE}=triton takes ours, which were seen on one H200"
    chosen = dispatch.describe(device_type)
    return ", ".join(f"{name} {chosen[name]}" for name in ("copy_slots", "state_at"))


def copy(original: Any, pool: Any, source: Any, destination: Any) -> None:
    """AROUND hook of MambaPool.copy_from: every layer's state and windows in one call."""
    cache = pool.mamba_cache
    more = getattr(pool, "replayssm_write_pos", None) is not None or compat.beside_states(pool)
    if more or not ours(cache.temporal.device.type):
        _copy_in_turns(original, pool, source, destination)
        return
    from sglang_hybrid_kernels.copy_slots import copy_slots

    copy_slots(_tensors(cache), source.reshape(-1), destination.reshape(-1), check_slots=False)


def _copy_in_turns(original: Any, pool: Any, source: Any, destination: Any) -> None:
    """SGLang's copy, which holds all of the states once more: 80 second turns in one pass of Qwen3-Next are 6 GB.

    What is copied from is in the tree and what is copied to is not, so some may be copied after others.
    """
    slot_bytes = sum(t.numel() // t.shape[1] * t.element_size() for t in _tensors(pool.mamba_cache))
    some = max(1, _HELD_BYTES // max(1, slot_bytes))
    if source.numel() <= some:
        original(pool, source, destination)
        return
    for pair in zip(source.split(some), destination.split(some), strict=True):
        original(pool, *pair)


_HELD_BYTES = 256 << 20


def _tensors(cache: Any) -> list[Any]:
    return [tensor for tensor in (*cache.conv, cache.temporal) if tensor.numel()]


def warm(pool: Any, model_runner: Any) -> None:
    """Compile and load what serving will launch, for SGLang's `pool` of states of the model that `model_runner` has.

    In the middle of serving it would take seconds, and loading it while other ranks wait in a collective can hang.
    """
    cache = pool.mamba_cache
    if not ours(cache.temporal.device.type):
        return
    from sglang_hybrid_kernels.warm import warm_copy_slots, warm_state_at

    warm_copy_slots(_tensors(cache))
    config, held = model_runner.model_config.hf_text_config, cache.temporal.shape[2]  # each rank has its share of heads
    heads = getattr(config, "linear_num_value_heads", 0)
    by_channel = is_by_channel(linear_backend(model_runner))
    if heads or by_channel:  # a delta rule, whose states inside a chunk are ours
        key_heads = held if by_channel else config.linear_num_key_heads * held // heads
        warm_state_at(
            cache.temporal[0], key_heads=key_heads, token_dtype=model_runner.dtype, by_channel=by_channel, l2norm=True
        )


_chunks: tuple[Any, ...] | None = None


def keep(original: Any, dispatcher: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, **more: Any) -> Any:
    """AROUND hook of the GDN prefill: keep what the states wanted inside its chunks are computed from.

    They are not written here: on a GPU a layer whose states lie apart prefills on a copy of them.
    """
    global _chunks
    result = original(dispatcher, q=q, k=k, v=v, g=g, beta=beta, **more)
    if forward.inside_chunks() is not None and result[2] is not None:
        _chunks = (*(x.squeeze(0) for x in (result[2], k, v, g, beta)), more["query_start_loc"])
    return result


def keep_by_channel(original: Any, dispatcher: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, **more: Any) -> Any:
    """AROUND hook of the KDA prefill: the same, whose decay and strength SGLang gives to the kernel unready."""
    global _chunks
    result = original(dispatcher, q=q, k=k, v=v, g=g, beta=beta, **more)
    if forward.inside_chunks() is not None and isinstance(result, tuple) and result[1] is not None:
        from sglang_hybrid_kernels.gates import log_decay

        decay = log_decay(g, more["A_log"], more["dt_bias"], more.get("lower_bound"))
        strength = beta.float().sigmoid() if more.get("beta_is_raw") else beta
        _chunks = (*(x.squeeze(0) for x in (result[1], k, v, decay, strength)), more["query_start_loc"])
    return result


def roll(_: Any, backend: Any, batch: Any, h: Any, ssm_states: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of the tracking behind a prefill: write the states that it leaves to us to the pool.

    They are those inside chunks, and with Kimi delta attention those at starts of chunks too.
    """
    global _chunks
    beside = forward.beside()
    if beside is not None and h is not None:
        ssm_states[beside.slots] = h.squeeze(0)[beside.chunks].to(ssm_states.dtype)
    kept, _chunks, wanted = _chunks, None, forward.inside_chunks()
    if kept is None or wanted is None:
        return
    from sglang_hybrid_kernels.state_at import state_at

    state_at(*kept, wanted.sequences, wanted.positions, ssm_states, wanted.slots, l2norm=True, check_slots=False)
