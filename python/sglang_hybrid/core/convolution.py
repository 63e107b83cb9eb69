"""Costs of layers whose state is nothing but convolution windows; questions as in `core/layers.py`."""

from dataclasses import dataclass

from sglang_hybrid.core.layers import Attention, Layer, shard


@dataclass(frozen=True)
class ShortConvolution(Layer):
    """LFM2's gated short convolution: `in_proj` D to 3D (input and two gates), K taps a channel, `out_proj` D*D."""

    hidden: int
    conv_kernel: int

    @property
    def kind(self) -> str:
        return "conv"

    @property
    def weights(self) -> int:
        return 4 * self.hidden * self.hidden + self.conv_kernel * self.hidden

    def conv_elements(self, tp: int = 1) -> int:
        return shard(self.hidden, tp, "hidden_size") * (self.conv_kernel - 1)


@dataclass(frozen=True)
class CompressedAttention(Layer):
    """Compressed convolutional attention (ZAYA1): queries and keys pass two convolutions over time, then attention.

    The first is depthwise, the second mixes the channels of a head. Half of the values come from the token before, so
    the state is the windows of both convolutions and one hidden vector, which every rank keeps whole.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    kernels: tuple[int, int]

    @property
    def kind(self) -> str:
        return "cca"

    @property
    def _attention(self) -> Attention:
        return Attention(self.hidden, self.heads, self.kv_heads, self.head_dim)

    @property
    def _channels(self) -> int:
        return (self.heads + self.kv_heads) * self.head_dim

    @property
    def weights(self) -> int:
        depthwise, grouped = self.kernels
        return self._attention.weights + self._channels * (depthwise + grouped * self.head_dim)

    @property
    def mixing_flops(self) -> float:
        return self._attention.mixing_flops

    @property
    def pair_flops(self) -> float:
        return self._attention.pair_flops

    @property
    def kv_rows(self) -> int:
        return self._attention.kv_rows

    def kv_elements(self, tp: int = 1) -> int:
        return self._attention.kv_elements(tp)

    def conv_elements(self, tp: int = 1) -> int:
        shard(self.kv_heads, tp, "num_query_groups")
        return shard(self._channels, tp, "CCA channels") * (sum(self.kernels) - 2) + self.hidden
