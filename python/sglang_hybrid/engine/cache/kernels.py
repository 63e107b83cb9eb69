"""The two kernel operations the cache uses: copies of states between slots, and states at positions inside a chunk.

`SGLANG_HYBRID_KERNELS` chooses: `auto` takes ours on a CPU and SGLang's own on a GPU, where ours were not run yet;
`triton` and `naive` take ours everywhere. Positions inside a chunk are then had for gated-delta-rule layers; elsewhere
the state at the start of the chunk serves instead.
"""

from __future__ import annotations

from typing import Any

from sglang_hybrid.engine.cache import forward
from sglang_hybrid_kernels import dispatch


def ours(device_type: str) -> bool:
    """Whether our operations run for tensors on `device_type`."""
    return device_type == "cpu" or dispatch.mode() != "auto"


def describe(device_type: str) -> str:
    """One line for the log."""
    if not ours(device_type):
        return f"SGLang's own; {dispatch.VARIABLE}=triton takes ours, which were not run on a GPU yet"
    chosen = dispatch.describe(device_type)
    return ", ".join(f"{name} {chosen[name]}" for name in ("copy_slots", "state_at"))


def copy(original: Any, pool: Any, source: Any, destination: Any) -> None:
    """AROUND hook of MambaPool.copy_from: every layer's state and windows in one call."""
    cache = pool.mamba_cache
    rings = getattr(pool, "replayssm_write_pos", None) is not None or getattr(pool, "_slot_siblings", ())
    if rings or not ours(cache.temporal.device.type):
        original(pool, source, destination)
        return
    from sglang_hybrid_kernels.copy_slots import copy_slots

    pools = [tensor for tensor in (*cache.conv, cache.temporal) if tensor.numel()]
    copy_slots(pools, source.reshape(-1), destination.reshape(-1), check_slots=False)


def roll(original: Any, dispatcher: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, **more: Any) -> Any:
    """AROUND hook of the GDN prefill: write the states wanted inside its chunks."""
    result = original(dispatcher, q=q, k=k, v=v, g=g, beta=beta, **more)
    wanted = forward.inside_chunks()
    if wanted is not None and result[2] is not None:
        from sglang_hybrid_kernels.state_at import state_at

        sequence, position, slots = wanted
        bounds, h = more["query_start_loc"], result[2]
        state_at(
            h.squeeze(0), k.squeeze(0), v.squeeze(0), g.squeeze(0), beta.squeeze(0), bounds, sequence, position,
            more["ssm_states"], slots, l2norm=True, check_slots=False,
        )  # fmt: skip
    return result
