"""Caches by policy name: what the simulator and the benchmarks open."""

from sglang_hybrid.core.spec import MAMBA_FULL_MEMORY_RATIO, ModelSpec, preset
from sglang_hybrid.prefix import policies
from sglang_hybrid.sim.bootstrap import PAPER, MarconiCache
from sglang_hybrid.sim.prefix_cache import PrefixCache
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.shape import Shape

POOLS = "pools:"
"""`pools:forecast` is a server's two pools of fixed size under that policy, without a prefix one budget of bytes."""


def open_cache(policy: str, capacity_bytes: int, model: ModelSpec | str, prompt_ends: bool = False) -> PrefixCache:
    """A cache of `capacity_bytes` for `model` (spec or preset name) under `policy` (`prefix.policies.find`).

    `prompt_ends`: as `PrefixCache`; `marconi-paper` stays as published. Raises ConfigError for unknown names.
    """
    spec = preset(model) if isinstance(model, str) else model
    if policies.find(policy).tuner != "bootstrap":
        return PrefixCache(spec, capacity_bytes, policy, prompt_ends)
    return MarconiCache(spec, capacity_bytes, **(PAPER if policy == "marconi-paper" else {"prompt_ends": prompt_ends}))


def open_server(policy: str, capacity_bytes: int, model: ModelSpec) -> SimulatedServer:
    """A server whose two pools share `capacity_bytes` as SGLang does by default, under `policy`."""
    for_states = capacity_bytes * MAMBA_FULL_MEMORY_RATIO / (1.0 + MAMBA_FULL_MEMORY_RATIO)
    states = int(for_states) // model.checkpoint_bytes
    kv_tokens = int(capacity_bytes - for_states) // model.kv_bytes_per_token
    return SimulatedServer(model, Shape(states, kv_tokens), policy)
