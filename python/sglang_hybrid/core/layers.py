"""Costs of one layer: active weights, prefill FLOPs, KV and state elements, as functions of its dimensions.

One frozen class per layer kind. All classes answer the same questions:

* `weights`: matrix elements one token is multiplied with (active experts only), convolution taps included;
* `linear_flops`: FLOPs per token of prefill that do not depend on the position (one multiply-add = 2 FLOPs);
* `pair_flops`: the coefficient of `end**2 - start**2`, non-zero for attention only;
* `kv_elements(tp)`: KV elements per token on one of `tp` ranks, in `kv_rows` equal rows (K and V, or one latent);
* `index_bytes`: bytes per token of an index beside KV, the same on every rank and with every type of KV;
* `temporal_elements(tp)` / `conv_elements(tp)`: elements of one recurrent state / one convolution window on one rank;
* `token_bytes`: bytes of the last tokens that are kept with a state, whose type no setting changes.

Starting point is Marconi, appendix A.1 and table 1: attention `8LD^2 + 4L^2D`, MLP `16LD^2`, SSM
`12LD^2 + 16LDN + 10L`, KV `4LD` bytes, state `2DN` bytes. It assumes multi-head attention of width D, a state of D
(not of the expanded inner width), no convolution window and dense MLPs; the classes below take the dimensions that
real models have. Element-wise work (norms, activations, gates, rotary embedding) is below 1 % and left out; so is the
output head, of which a prefill needs only the last row.
"""

from dataclasses import dataclass

from sglang_hybrid.core.errors import ConfigError

KINDS = ("attention", "cca", "conv", "gdn", "kda", "lightning", "mamba1", "mamba2", "mlp", "moe", "ngram", "streams")


def shard(count: int, tp: int, what: str) -> int:
    """`count / tp`; raises ConfigError if the ranks would get unequal parts."""
    if count % tp:
        raise ConfigError(f"choose a tensor parallel size that divides {what}={count}: {tp}")
    return count // tp


@dataclass(frozen=True)
class Layer:
    """A layer that stores nothing and costs nothing; the base of the kinds."""

    @property
    def kind(self) -> str:
        raise NotImplementedError

    @property
    def weights(self) -> int:
        raise NotImplementedError

    @property
    def mixing_flops(self) -> float:
        """FLOPs per token beyond the weight products: scan, delta rule, chunk matrices."""
        return 0.0

    @property
    def linear_flops(self) -> float:
        return 2.0 * self.weights + self.mixing_flops

    @property
    def pair_flops(self) -> float:
        return 0.0

    @property
    def kv_rows(self) -> int:
        return 0

    def kv_elements(self, tp: int = 1) -> int:
        return 0

    @property
    def index_bytes(self) -> int:
        return 0

    def temporal_elements(self, tp: int = 1) -> int:
        return 0

    def conv_elements(self, tp: int = 1) -> int:
        return 0

    @property
    def token_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class Attention(Layer):
    """Grouped-query attention with causal mask.

    Projections: `D*Hd` for the query (twice with an output gate, as in Qwen3-Next), `2*D*Gd` for G key-value heads,
    `Hd*D_out` back. Scores and values cost `4Hd` FLOPs per (query, key) pair; a query at position t sees t keys, so a
    prefill from `start` to `end` costs `2Hd*(end^2 - start^2)` plus `2Hd` per token for the diagonal. Marconi's
    `4L^2D` has no mask: flash kernels skip the masked half, hence the factor two. `extra_weights` holds adapters.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    output_gate: bool = False
    out: int = 0  # width of the output projection, `hidden` if 0
    extra_weights: int = 0

    @property
    def kind(self) -> str:
        return "attention"

    @property
    def weights(self) -> int:
        query = self.hidden * self.heads * self.head_dim * (2 if self.output_gate else 1)
        key_value = 2 * self.hidden * self.kv_heads * self.head_dim
        return query + key_value + self.heads * self.head_dim * (self.out or self.hidden) + self.extra_weights

    @property
    def mixing_flops(self) -> float:
        return 2.0 * self.heads * self.head_dim

    @property
    def pair_flops(self) -> float:
        return 2.0 * self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return 2

    def kv_elements(self, tp: int = 1) -> int:
        """K and V of the rank's heads; a head is replicated when there are fewer heads than ranks, as SGLang does."""
        shard(self.heads, tp, "num_attention_heads")
        return 2 * max(1, self.kv_heads // tp) * self.head_dim


@dataclass(frozen=True)
class LatentAttention(Layer):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): KV is one latent vector plus one rotary key per token.

    Prefill runs in the expanded form: query `D*H(dn+dr)` (through rank `q_rank` if > 0), latent `D*(r+dr)`, expansion
    `r*H(dn+dv)`, output `H*dv*D`; a pair costs `2H(dn+dr+dv)` FLOPs. Ranks replicate the latent. `extra_weights` holds
    an output gate. Without `rotary` the rotary key turns by no position (Kimi Linear).
    """

    hidden: int
    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_rank: int
    q_rank: int = 0
    extra_weights: int = 0
    rotary: bool = True

    @property
    def kind(self) -> str:
        return "attention"

    @property
    def weights(self) -> int:
        query_width = self.heads * (self.nope_dim + self.rope_dim)
        query = self.q_rank * (self.hidden + query_width) if self.q_rank else self.hidden * query_width
        latent = self.hidden * (self.kv_rank + self.rope_dim)
        expansion = self.kv_rank * self.heads * (self.nope_dim + self.v_dim)
        return query + latent + expansion + self.heads * self.v_dim * self.hidden + self.extra_weights

    @property
    def mixing_flops(self) -> float:
        return self.pair_flops

    @property
    def pair_flops(self) -> float:
        return 1.0 * self.heads * (self.nope_dim + self.rope_dim + self.v_dim)

    @property
    def kv_rows(self) -> int:
        return 1

    def kv_elements(self, tp: int = 1) -> int:
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class ResidualStreams(Layer):
    """What mixes several residual streams around a mixer and its feed-forward: two of `per_part` weights."""

    per_part: int

    @property
    def kind(self) -> str:
        return "streams"

    @property
    def weights(self) -> int:
        return 2 * self.per_part


@dataclass(frozen=True)
class Mlp(Layer):
    """Feed-forward layer of `3*D*F` weights when gated (SwiGLU), `2*D*F` otherwise; Marconi's `16LD^2` has F = 4D."""

    hidden: int
    intermediate: int
    gated: bool = True
    extra_weights: int = 0

    @property
    def kind(self) -> str:
        return "mlp"

    @property
    def weights(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.intermediate + self.extra_weights


@dataclass(frozen=True)
class Moe(Layer):
    """Mixture of experts: router, `top_k` active experts of width F, and a shared expert of width F_s for all tokens.

    With a latent width (Nemotron 3 Super and up) routed experts work on `latent` channels between two projections.
    `router` is the router's weights where it is more than one matrix `D*experts`.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    shared_intermediate: int = 0
    shared_gate: bool = False
    gated: bool = True
    latent: int = 0
    router: int = 0

    @property
    def kind(self) -> str:
        return "moe"

    @property
    def weights(self) -> int:
        matrices = 3 if self.gated else 2
        width = self.latent or self.hidden
        routed = self.top_k * matrices * width * self.intermediate + (2 * self.hidden * width if self.latent else 0)
        shared = matrices * self.hidden * self.shared_intermediate + (self.hidden if self.shared_gate else 0)
        return (self.router or self.hidden * self.experts) + routed + shared
