"""Costs of attention that chooses what it reads by an index beside KV, and of embeddings of n-grams.

Questions as in `core/layers.py`. A query scores an index of all keys before it, which is the part that grows with the
prompt, and attends to `chosen` tokens. The chosen part is priced as though every query had as many: for a prompt of
fewer it is too dear, by about a tenth of the whole model in GLM-5.3.
"""

from dataclasses import dataclass, replace

from sglang_hybrid.core.layers import Attention, LatentAttention, Layer


@dataclass(frozen=True)
class Index:
    """What chooses tokens: `heads` queries of `dim` numbers, compared with one key for each `pooled` tokens.

    `bytes_per_token` is what SGLang keeps of it, `weights` its projections, `chosen` the tokens that a query reads.
    A layer that reads what the one before it chose has an index of no heads and no bytes.
    """

    heads: int
    dim: int
    pooled: int
    chosen: int
    weights: int
    bytes_per_token: int

    @property
    def pair_flops(self) -> float:
        """Scores of one query and key, halved by the causal mask as in `Attention`."""
        return 1.0 * self.heads * self.dim / self.pooled


@dataclass(frozen=True)
class _Indexed(Layer):
    """What an index adds to the attention beside which it stands: it comes first among the bases."""

    index: Index = Index(0, 0, 1, 0, 0, 0)

    @property
    def weights(self) -> int:
        return super().weights + self.index.weights

    @property
    def mixing_flops(self) -> float:
        return self.chosen_flops * self.index.chosen + self.pair_flops

    @property
    def chosen_flops(self) -> float:
        """FLOPs of a query for each token that it reads."""
        raise NotImplementedError

    @property
    def pair_flops(self) -> float:
        return self.index.pair_flops

    @property
    def index_bytes(self) -> int:
        return self.index.bytes_per_token


@dataclass(frozen=True)
class SparseAttention(_Indexed, Attention):
    """Grouped-query attention over the tokens that `index` chooses (Qwen4-Exp)."""

    @property
    def chosen_flops(self) -> float:
        return 4.0 * self.heads * self.head_dim


@dataclass(frozen=True)
class SparseLatentAttention(_Indexed, LatentAttention):
    """Latent attention over the tokens that `index` chooses (DeepSeek-V3.2, GLM-5.3).

    It runs absorbed: a query is compared with the latent itself, which is key and value of all heads.
    """

    @property
    def chosen_flops(self) -> float:
        return 2.0 * self.heads * (2 * self.kv_rank + self.rope_dim)

    def with_pooled_index(self) -> "SparseLatentAttention":
        """The layer as SGLang 0.5.23 keeps it: a key for the tokens that share one, where 0.5.21 has room for each."""
        held = -(-self.index.bytes_per_token // self.index.pooled)
        return replace(self, index=replace(self.index, bytes_per_token=held))


@dataclass(frozen=True)
class NgramEmbedding(Layer):
    """An embedding of the last n-grams behind a dilated convolution, which has a window (Qwen4-Exp).

    From `embedded` numbers to keys of `streams` times D and values of D; a convolution of `conv_kernel` taps that lie
    `ngram` tokens apart, over all streams. Every rank keeps the whole window. `context` are the tokens before the next
    that SGLang keeps once for all such layers, as numbers of eight bytes: 0 in all but one.
    """

    hidden: int
    streams: int
    embedded: int
    conv_kernel: int
    ngram: int
    context: int

    @property
    def kind(self) -> str:
        return "ngram"

    @property
    def weights(self) -> int:
        width = self.hidden * self.streams
        return self.embedded * (width + self.hidden) + self.conv_kernel * width

    def conv_elements(self, tp: int = 1) -> int:
        return (self.conv_kernel - 1) * self.ngram * self.hidden * self.streams

    @property
    def token_bytes(self) -> int:
        return 8 * self.context
