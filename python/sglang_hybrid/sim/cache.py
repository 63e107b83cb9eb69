"""Caches by policy name: what the simulator and the benchmarks open."""

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import MAMBA_FULL_MEMORY_RATIO, ModelSpec, preset
from sglang_hybrid.prefix import policies
from sglang_hybrid.prefix.log_schema import SLOTS_PER_PASS
from sglang_hybrid.sim.bootstrap import PAPER, MarconiCache
from sglang_hybrid.sim.prefix_cache import PrefixCache
from sglang_hybrid.sim.saving import Saving
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.shape import Shape

POOLS = "pools:"
"""`pools:forecast` is a server's two pools of fixed size under that policy, without a prefix one budget of bytes."""


def open_cache(policy: str, capacity_bytes: int, model: ModelSpec | str, saving: Saving | None = None) -> PrefixCache:
    """A cache of `capacity_bytes` for `model` (spec or preset name) under `policy` (`prefix.policies.find`).

    `saving`: as `PrefixCache`; `marconi-paper` stays as published. Raises ConfigError for unknown names.
    """
    spec = preset(model) if isinstance(model, str) else model
    if policies.find(policy).tuner != "bootstrap":
        return PrefixCache(spec, capacity_bytes, policy, saving)
    return MarconiCache(spec, capacity_bytes, **(PAPER if policy == "marconi-paper" else {"saving": saving}))


def open_server(policy: str, capacity_bytes: int, model: ModelSpec, saving: Saving | None = None) -> SimulatedServer:
    """A server whose two pools share `capacity_bytes` as SGLang does by default, under `policy`.

    Without `saving` it has the extra buffer and a grid of 64, whatever the model.
    """
    if not model.checkpoint_bytes or not model.kv_bytes_per_token:
        raise ConfigError(f"a model without states or without KV needs one pool only, leave out {POOLS}: {model.name}")
    for_states = capacity_bytes * MAMBA_FULL_MEMORY_RATIO / (1.0 + MAMBA_FULL_MEMORY_RATIO)
    states = int(for_states) // model.checkpoint_bytes
    kv_tokens = int(capacity_bytes - for_states) // model.kv_bytes_per_token
    if states <= SLOTS_PER_PASS:
        raise ConfigError(
            f"the pool of states of a server with {capacity_bytes / 1e9:g} GB for {model.name} holds too few, a pass "
            f"alone takes {SLOTS_PER_PASS}; raise --capacity-gb or leave out {POOLS}{policy}: {states}"
        )
    saving = saving or Saving()
    shape = Shape(
        states, kv_tokens, saving.grid, saving.step, buffers=int(saving.buffered), track_tokens=saving.track_tokens,
        page=saving.page,
    )  # fmt: skip
    return SimulatedServer(model, shape, policy)
