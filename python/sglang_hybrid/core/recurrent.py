"""Costs of one recurrent layer: gated delta rule, lightning attention, Mamba; questions as in `core/layers.py`."""

from dataclasses import dataclass

from sglang_hybrid.core.layers import Layer, shard

DELTA_CHUNK_TOKENS = 64  # chunk of the gated delta rule kernels (flash-linear-attention; the same in SGLang)


def delta_rule_flops(heads: int, k_dim: int, v_dim: int) -> float:
    """FLOPs per token of the chunked gated delta rule (Yang et al. 2024, arXiv 2406.06484 section 3; 2412.06464).

    Per head and token, chunk C: `K K^T` and `Q K^T` 2C*dk each, inverse of the unit triangular C x C matrix C^2/3,
    `W = T K` 2C*dk, `U = T V` 2C*dv, in-chunk output 2C*dv, and three products with the state (correction, output,
    update) 2*dk*dv each. Kernels compute whole C x C tiles, so no causal half is taken off.
    """
    chunk = DELTA_CHUNK_TOKENS
    return heads * (2.0 * chunk * (3 * k_dim + 2 * v_dim) + chunk * chunk / 3.0 + 6.0 * k_dim * v_dim)


@dataclass(frozen=True)
class GatedDeltaNet(Layer):
    """Gated DeltaNet as in Qwen3-Next: projections q, k, v, z, b, a; convolution over q, k, v; delta rule; output.

    The state is `v_heads * k_dim * v_dim`, the window covers `2 * k_heads * k_dim + v_heads * v_dim` channels.
    """

    hidden: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int

    @property
    def kind(self) -> str:
        return "gdn"

    @property
    def conv_width(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def weights(self) -> int:
        value_width = self.v_heads * self.v_dim
        projections = self.hidden * (self.conv_width + value_width + 2 * self.v_heads) + value_width * self.hidden
        return projections + self.conv_kernel * self.conv_width

    @property
    def mixing_flops(self) -> float:
        return delta_rule_flops(self.v_heads, self.k_dim, self.v_dim)

    def temporal_elements(self, tp: int = 1) -> int:
        return shard(self.v_heads, tp, "linear_num_value_heads") * self.k_dim * self.v_dim

    def conv_elements(self, tp: int = 1) -> int:
        k_heads = grouped_heads(self.k_heads, tp)
        width = 2 * k_heads * self.k_dim + self.v_heads * self.v_dim
        return shard(width, tp, "convolution width") * (self.conv_kernel - 1)


@dataclass(frozen=True)
class JetBlock(GatedDeltaNet):
    """Jet-Nemotron's block: a gated delta rule whose convolution, over v only, has taps that are computed per token.

    They come from D through `v_width / reduction` channels. SGLang keeps a window over q, k and v all the same.
    """

    reduction: int = 1

    @property
    def weights(self) -> int:
        value_width = self.v_heads * self.v_dim
        inner = value_width // self.reduction
        taps = self.hidden * inner + inner * value_width * self.conv_kernel
        # super().weights: the same projections, and taps of q, k and v, which are not there
        return super().weights - self.conv_kernel * self.conv_width + taps + self.conv_kernel * value_width


def grouped_heads(groups: int, tp: int) -> int:
    """Groups of all ranks together; each rank needs the group its heads read, so `tp` if `tp` does not divide `groups`.

    The same rule as in SGLang (`configs/mamba_utils.py`), so that convolution windows have the same size.
    """
    return groups if groups % tp == 0 else tp


@dataclass(frozen=True)
class KimiDeltaAttention(Layer):
    """Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): delta rule with a decay per key channel.

    q, k, v, o projections of H*d each, low-rank (rank d) decay and output gates, one beta per head; three convolutions.
    Kimi K3 has a full output gate (D*H*d), Ling 3 may have both of them full.
    """

    hidden: int
    heads: int
    head_dim: int
    conv_kernel: int
    full_gate: bool = False
    full_decay: bool = False

    @property
    def kind(self) -> str:
        return "kda"

    @property
    def weights(self) -> int:
        width = self.heads * self.head_dim
        low_rank = self.hidden * self.head_dim + self.head_dim * width
        gates = sum(self.hidden * width if full else low_rank for full in (self.full_gate, self.full_decay))
        return 4 * self.hidden * width + gates + self.hidden * self.heads + 3 * self.conv_kernel * width

    @property
    def mixing_flops(self) -> float:
        return delta_rule_flops(self.heads, self.head_dim, self.head_dim)

    def temporal_elements(self, tp: int = 1) -> int:
        return shard(self.heads, tp, "linear_attn_config.num_heads") * self.head_dim * self.head_dim

    def conv_elements(self, tp: int = 1) -> int:
        return 3 * shard(self.heads * self.head_dim, tp, "KDA projection width") * (self.conv_kernel - 1)


@dataclass(frozen=True)
class LightningAttention(Layer):
    """Lightning attention (MiniMax-01, arXiv 2501.08313 section 2.2): linear attention with a fixed decay per head.

    q, k, v and output of H*d each, and an output gate. In chunks of C tokens a head and token cost `Q K^T` and its
    product with V 2C*d each, the state's share of the output and its update 2d*d each. No window: the state is H*d*d.
    """

    hidden: int
    heads: int
    head_dim: int
    output_gate: bool = False
    chunk: int = DELTA_CHUNK_TOKENS

    @property
    def kind(self) -> str:
        return "lightning"

    @property
    def weights(self) -> int:
        return (5 if self.output_gate else 4) * self.hidden * self.heads * self.head_dim

    @property
    def mixing_flops(self) -> float:
        return 4.0 * self.heads * self.head_dim * (self.chunk + self.head_dim)

    def temporal_elements(self, tp: int = 1) -> int:
        return shard(self.heads, tp, "number of lightning heads") * self.head_dim * self.head_dim


@dataclass(frozen=True)
class Mamba2(Layer):
    """Mamba-2 mixer; the inner width `heads * head_dim` is usually twice the hidden width, unlike in Marconi's `2DN`.

    State space duality in chunks of Q (Dao & Gu 2024, arXiv 2405.21060 section 6): `C B^T` 2Q*N per group, in-chunk
    output 2Q per channel, chunk state and output from the state 2N per channel each.
    """

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int
    conv_kernel: int
    chunk: int

    @property
    def kind(self) -> str:
        return "mamba2"

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_width(self) -> int:
        return self.inner + 2 * self.groups * self.state

    @property
    def weights(self) -> int:
        in_proj = self.hidden * (self.inner + self.conv_width + self.heads)
        return in_proj + self.inner * self.hidden + self.conv_kernel * self.conv_width

    @property
    def mixing_flops(self) -> float:
        in_chunk = 2.0 * self.chunk * (self.groups * self.state + self.inner)
        return in_chunk + 4.0 * self.inner * self.state

    def temporal_elements(self, tp: int = 1) -> int:
        return shard(self.heads, tp, "number of Mamba heads") * self.head_dim * self.state

    def conv_elements(self, tp: int = 1) -> int:
        width = self.inner + 2 * grouped_heads(self.groups, tp) * self.state
        return shard(width, tp, "convolution width") * (self.conv_kernel - 1)


@dataclass(frozen=True)
class Mamba1(Layer):
    """Mamba-1 mixer: `in_proj` 2*D*I, `x_proj` I*(r+2N), `dt_proj` r*I, `out_proj` I*D, convolution over I channels.

    The scan costs 8 FLOPs per channel and state element (discretise, update, read out): with I = 2D this is
    Marconi's `16LDN`, and the projections are its `12LD^2`.
    """

    hidden: int
    inner: int
    state: int
    dt_rank: int
    conv_kernel: int

    @property
    def kind(self) -> str:
        return "mamba1"

    @property
    def weights(self) -> int:
        selection = self.inner * (2 * self.dt_rank + 2 * self.state)
        return 3 * self.hidden * self.inner + selection + self.conv_kernel * self.inner

    @property
    def mixing_flops(self) -> float:
        return 8.0 * self.inner * self.state

    def temporal_elements(self, tp: int = 1) -> int:
        return shard(self.inner, tp, "Mamba inner width") * self.state

    def conv_elements(self, tp: int = 1) -> int:
        return shard(self.inner, tp, "Mamba inner width") * (self.conv_kernel - 1)
