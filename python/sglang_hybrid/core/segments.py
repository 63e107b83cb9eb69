"""What a segment costs to keep and to reuse, from the layers of a model.

Of each linear layer a segment keeps its state from a zero start S_C, the last inputs of the convolution, and the
transition T of each head. A T that is a matrix (delta rules) takes memory only where it has not vanished: most heads
forget within a segment all that was before it. Of each attention layer a segment keeps K and V, or the latent.
`engine/segments/store.py` lays it out so; a conformance test holds both against each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.layers import LatentAttention, Layer, shard
from sglang_hybrid.core.recurrent import GatedDeltaNet, KimiDeltaAttention, Mamba2
from sglang_hybrid.core.spec import DTYPE_BYTES, ModelSpec

STATE_DTYPES: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "int8": 1, "float32": 4})
"""How states of segments may be stored (`--hybrid-segment-dtype`), bytes of an element."""

_ALIGNED = 16
_NUMBER_BYTES, _SCALE_BYTES = 8, 4


@dataclass(frozen=True)
class SegmentCosts:
    """Of one rank: `state_bytes` of a segment, `token_bytes` for each token of its interior, and `transition_bytes` for
    each of its `transitions` that has not vanished. `window` are the tokens that a convolution looks back on,
    `jump_flops` what a reuse computes beside its seams: S <- T S + S_C."""

    state_bytes: int
    token_bytes: int
    transitions: int
    transition_bytes: int
    window: int
    jump_flops: float

    @property
    def whole_bytes(self) -> int:
        """States of a segment of which no transition has vanished."""
        return self.state_bytes + self.transitions * self.transition_bytes

    @property
    def block_tokens(self) -> int:
        """Tokens of KV in a block, which holds the states of one segment, or KV or transitions of several."""
        return -(-max(self.state_bytes, self.transition_bytes, 1) // self.token_bytes)

    @property
    def block_transitions(self) -> int:
        """Transitions in a block."""
        return self.block_bytes // self.transition_bytes if self.transition_bytes else 1

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
    other = sorted(
        {layer.kind for layer in layers if not isinstance(layer, GatedDeltaNet | KimiDeltaAttention | Mamba2)}
    )
    turned = any(isinstance(layer, LatentAttention) and layer.rotary for layer in spec.layers)
    if not layers or other or turned or not spec.kv_bytes_per_token:
        raise ConfigError(
            "segments need attention (MLA only without positions) with gated delta rules, Kimi delta attention or "
            f"Mamba-2 beside it: {spec.name}"
        )
    size = STATE_DTYPES[dtype]
    matrices = {_transition_bytes(layer, spec, size) for layer in layers} - {0}
    if len(matrices) > 1:
        raise ConfigError(f"segments need transitions of one size in all layers: {sorted(matrices)}")
    return SegmentCosts(
        sum(_state_bytes(layer, spec, size) for layer in layers),
        _aligned(spec.kv_bytes_per_token),
        sum(_shape(layer, spec.tp)[0] for layer in layers if _transition_bytes(layer, spec, size)),
        max(matrices, default=0),
        max(_taps(layer) - 1 for layer in layers),
        sum(_jump_flops(layer, spec.tp) for layer in layers),
    )


def _state_bytes(layer: Layer, spec: ModelSpec, size: int) -> int:
    """Without transitions that are matrices: in their place each head has the number of its slot."""
    heads, values, keys, dense = _shape(layer, spec.tp)
    transition = heads * (_NUMBER_BYTES if dense else _SCALE_BYTES)
    scales = heads * keys * _SCALE_BYTES if size == 1 else 0
    window = layer.conv_elements(spec.tp) * DTYPE_BYTES[spec.conv_dtype]
    return sum(map(_aligned, (transition, heads * values * keys * size, window, scales)))


def _transition_bytes(layer: Layer, spec: ModelSpec, size: int) -> int:
    """Of one head, 0 where it is a number."""
    _, _, keys, dense = _shape(layer, spec.tp)
    if not dense:
        return 0
    return _aligned(keys * keys * size) + (_aligned(keys * _SCALE_BYTES) if size == 1 else 0)


def _jump_flops(layer: Layer, tp: int) -> float:
    heads, values, keys, dense = _shape(layer, tp)
    return 2.0 * heads * values * keys * (keys if dense else 1)


def _shape(layer: Layer, tp: int) -> tuple[int, int, int, bool]:
    """Heads, sizes of their values and keys, and whether T is a matrix [keys, keys] or a number."""
    if isinstance(layer, GatedDeltaNet):
        return shard(layer.v_heads, tp, "linear_num_value_heads"), layer.v_dim, layer.k_dim, True
    if isinstance(layer, KimiDeltaAttention):
        return shard(layer.heads, tp, "linear_attn_config.num_heads"), layer.head_dim, layer.head_dim, True
    assert isinstance(layer, Mamba2)
    return shard(layer.heads, tp, "number of Mamba heads"), layer.head_dim, layer.state, False


def _taps(layer: Layer) -> int:
    assert isinstance(layer, GatedDeltaNet | KimiDeltaAttention | Mamba2)
    return layer.conv_kernel


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
