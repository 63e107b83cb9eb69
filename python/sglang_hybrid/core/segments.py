"""What a segment costs to keep and to reuse, from the layers of a model.

Of each linear layer a segment keeps its transition T, its state from a zero start S_C, the last inputs of the
convolution, and which heads' T has vanished; of each attention layer, K and V. `engine/segments/store.py` lays it out
so; a conformance test holds both against each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.layers import LatentAttention, Layer, shard
from sglang_hybrid.core.recurrent import GatedDeltaNet, Mamba2
from sglang_hybrid.core.spec import DTYPE_BYTES, ModelSpec

STATE_DTYPES: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "int8": 1, "float32": 4})
"""How states of segments may be stored (`--hybrid-segment-dtype`), bytes of an element."""

_ALIGNED = 16
_SCALE_BYTES = 4


@dataclass(frozen=True)
class SegmentCosts:
    """Of one rank: `state_bytes` of a segment, `token_bytes` for each token of its interior, `window`, the tokens that
    a convolution looks back on, and `jump_flops`, what a reuse computes beside its seams: S <- T S + S_C."""

    state_bytes: int
    token_bytes: int
    window: int
    jump_flops: float

    @property
    def block_tokens(self) -> int:
        """Tokens of KV in a block, which holds the states of one segment or the KV of several."""
        return max(1, -(-self.state_bytes // self.token_bytes))

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes


def segment_costs(spec: ModelSpec, dtype: str = "bfloat16") -> SegmentCosts:
    """Costs with states stored as `dtype`, a name in STATE_DTYPES; raises ConfigError for models without segments."""
    if dtype not in STATE_DTYPES:
        raise ConfigError(f"states of segments are stored as one of {', '.join(STATE_DTYPES)}: {dtype}")
    if not spec.layers:
        raise ConfigError(
            f"only the total costs of this model are known; name it with --model for segments: {spec.name}"
        )
    layers = [layer for layer in spec.layers if layer.temporal_elements(1) or layer.conv_elements(1)]
    other = sorted({layer.kind for layer in layers if not isinstance(layer, GatedDeltaNet | Mamba2)})
    latent = any(isinstance(layer, LatentAttention) for layer in spec.layers)
    if not layers or other or latent or not spec.kv_bytes_per_token:
        raise ConfigError(f"segments need attention (no MLA) with gated delta rules or Mamba-2 beside it: {spec.name}")
    return SegmentCosts(
        sum(_state_bytes(layer, spec, STATE_DTYPES[dtype]) for layer in layers),
        _aligned(spec.kv_bytes_per_token),
        max(_taps(layer) - 1 for layer in layers),
        sum(_jump_flops(layer, spec.tp) for layer in layers),
    )


def _state_bytes(layer: Layer, spec: ModelSpec, size: int) -> int:
    heads, values, keys, dense = _shape(layer, spec.tp)
    transition = heads * keys * keys * size if dense else heads * 4
    scales = (2 if dense else 1) * [heads * keys * _SCALE_BYTES] if size == 1 else []
    window = layer.conv_elements(spec.tp) * DTYPE_BYTES[spec.conv_dtype]
    return sum(map(_aligned, (transition, heads * values * keys * size, window, heads, *scales)))


def _jump_flops(layer: Layer, tp: int) -> float:
    heads, values, keys, dense = _shape(layer, tp)
    return 2.0 * heads * values * keys * (keys if dense else 1)


def _shape(layer: Layer, tp: int) -> tuple[int, int, int, bool]:
    """Heads, sizes of their values and keys, and whether T is a matrix [keys, keys] or a number."""
    if isinstance(layer, GatedDeltaNet):
        return shard(layer.v_heads, tp, "linear_num_value_heads"), layer.v_dim, layer.k_dim, True
    assert isinstance(layer, Mamba2)
    return shard(layer.heads, tp, "number of Mamba heads"), layer.head_dim, layer.state, False


def _taps(layer: Layer) -> int:
    assert isinstance(layer, GatedDeltaNet | Mamba2)
    return layer.conv_kernel


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
