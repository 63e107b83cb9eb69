"""How many states and tokens a budget of memory holds, as a server sizes its pools."""

from dataclasses import dataclass

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import MAMBA_FULL_MEMORY_RATIO, ModelSpec

RATIOS = (0.3, MAMBA_FULL_MEMORY_RATIO, 3.0)
"""Bytes of states per byte of KV that a plan shows: about a quarter for states, SGLang's default, three quarters."""


@dataclass(frozen=True)
class Split:
    """What one division of the budget gives; `states` and `tokens` as the server reports them."""

    name: str
    states: int
    tokens: int
    used_bytes: int


def static_split(spec: ModelSpec, budget_bytes: int, ratio: float) -> Split:
    """SGLang's two pools under `--mamba-full-memory-ratio` `ratio`; one slot of the states is its padding.

    Raises ConfigError if the budget holds not one state.
    """
    states = padded = 0
    if spec.is_recurrent:
        states = int(budget_bytes * ratio / (1.0 + ratio)) // spec.checkpoint_bytes - 1
        padded = states + 1
        if states < 1:
            least = 2 * spec.checkpoint_bytes * (1.0 + ratio) / ratio / 1e9
            raise ConfigError(
                f"a state takes {spec.checkpoint_bytes:,} bytes and a ratio of {ratio:g} wants {least:.2f} GB or more, "
                f"raise --memory-gb: {budget_bytes / 1e9:g}"
            )
    left_bytes = budget_bytes - padded * spec.checkpoint_bytes
    tokens = left_bytes // spec.kv_bytes_per_token if spec.kv_bytes_per_token else 0
    return Split(f"ratio {ratio:g}", states, tokens, spec.bytes_for(tokens, padded))


def splits(spec: ModelSpec, budget_bytes: int, ratio: float | None = None) -> list[Split]:
    """The splits worth seeing, or the one of `ratio`; a model without recurrent layers has one. Raises ConfigError."""
    if budget_bytes <= 0:
        raise ConfigError(f"give a positive number of GB: {budget_bytes / 1e9:g}")
    if ratio is not None:
        if not 0.0 < ratio < float("inf"):
            raise ConfigError(f"a ratio is bytes of states per byte of KV, more than 0: {ratio:g}")
        return [static_split(spec, budget_bytes, ratio)]
    return [static_split(spec, budget_bytes, r) for r in (RATIOS if spec.is_recurrent else RATIOS[1:2])]
