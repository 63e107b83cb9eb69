"""Families whose attention chooses what it reads by an index beside KV: GLM-5.3 and Qwen4-Exp."""

from sglang_hybrid.core.architecture import (
    Architecture,
    attention,
    depth,
    experts_after_the_first,
    gated_delta,
    head_depth,
    is_recurrent,
    latent_attention,
    layer_labels,
    state_dtype,
)
from sglang_hybrid.core.families.qwen import interval_labels, qwen_feed_forward
from sglang_hybrid.core.layers import LatentAttention, Layer, ResidualStreams
from sglang_hybrid.core.reading import ConfigReader
from sglang_hybrid.core.recurrent import DELTA_CHUNK_TOKENS, KimiDeltaAttention
from sglang_hybrid.core.sparse import Index, NgramEmbedding, SparseAttention, SparseLatentAttention

_GLM = {
    "n_routed_experts": 288,
    "num_experts_per_tok": 7,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "linear_head_dim": 128,
    "linear_num_heads": 64,
    "linear_conv_kernel_dim": 4,
    "mla_use_nope": True,
}
"""What SGLang's configuration class takes for keys that are absent; its attention has no rotary positions."""

_SPARSE_LABELS = ("qwen_sparse_attention", "indexed_attention")
_SCALED_BLOCK = 128  # numbers of an index key that share a scale of four bytes, in SGLang's DSATokenToKVPool


def glm5_next(reader: ConfigReader) -> Architecture:
    """GLM-5.3: KDA, listed from zero, and latent attention with an index; experts; up to four residual streams."""
    reader = reader.with_defaults(_GLM)
    delta, recurrent = _glm_delta(reader)
    latent = latent_attention(reader)
    streams: list[Layer] = []
    if reader.flag("mhc", default=False):
        mult = reader.count("hc_mult", default=4)
        streams = [ResidualStreams((2 + mult) * mult * mult * reader.count("hidden_size"))]
    layers: list[Layer] = []
    for number, feed_forward in enumerate(experts_after_the_first(reader, "n_routed_experts", "n_shared_experts")):
        mixer = delta if number in recurrent else _glm_attention(reader, latent, number)
        layers += [mixer, feed_forward, *streams]
    return Architecture(tuple(layers), chunk_tokens=DELTA_CHUNK_TOKENS)


def _glm_delta(reader: ConfigReader) -> tuple[KimiDeltaAttention, set[int]]:
    """The recurrent layer, and the numbers of those that are one."""
    hidden = reader.count("hidden_size")
    if reader.value("linear_attn_config") is not None:
        linear = reader.nested("linear_attn_config")
        sizes = (linear.count("num_heads"), linear.count("head_dim"), linear.count("short_conv_kernel_size", minimum=2))
        return KimiDeltaAttention(hidden, *sizes), set(linear.items("kda_layers", of=int) or ())
    heads, dim = reader.count("linear_num_heads"), reader.count("linear_head_dim")
    labels = layer_labels(reader)
    if labels is None:
        labels = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(depth(reader))]
    numbers = {number for number, label in enumerate(labels) if label == "linear_attention"}
    return KimiDeltaAttention(hidden, heads, dim, reader.count("linear_conv_kernel_dim", minimum=2)), numbers


def _glm_attention(reader: ConfigReader, latent: LatentAttention, number: int) -> LatentAttention:
    """Latent attention of layer `number`, with an index if the configuration has one."""
    if reader.value("index_topk") is None:
        return latent
    chosen = reader.count("index_topk")
    if _reads_the_choice_before(reader, number):
        return SparseLatentAttention(**vars(latent), index=Index(0, 0, 1, chosen, 0, 0))
    heads, dim = reader.count("index_n_heads"), reader.count("index_head_dim")
    pooled = reader.count("index_kpool", default=1)
    queries = (latent.q_rank or latent.hidden) * heads * dim
    weights = queries + latent.hidden * (dim * (2 if pooled > 1 else 1) + heads)
    index = Index(heads, dim, pooled, chosen, weights, dim + dim // _SCALED_BLOCK * 4)
    return SparseLatentAttention(**vars(latent), index=index)


def _reads_the_choice_before(reader: ConfigReader, number: int) -> bool:
    """Whether layer `number` attends to what an earlier one chose, and keeps no index: SGLang's `dsa_layer_skips_topk`.

    With a host tier or PD SGLang keeps an index for these layers all the same, and no one reads it.
    """
    pattern = reader.text("index_topk_pattern", default="")
    if pattern:
        return number < len(pattern) and pattern[number] == "S"
    every = reader.count("index_topk_freq", default=1)
    return max(number - reader.count("index_skip_topk_offset", default=2) + 1, 0) % every != 0


def qwen4_exp(reader: ConfigReader) -> Architecture:
    """Qwen4-Exp: Qwen3.5's layers over several residual streams, an index beside KV, embeddings of n-grams."""
    hidden, count = reader.count("hidden_size"), depth(reader)
    labels = layer_labels(reader) or interval_labels(reader)
    labels = ["full_attention" if label in _SPARSE_LABELS else label for label in labels]
    streams, rank = reader.count("hc_count", default=4, minimum=2), reader.count("hc_lowrank", default=320)
    mixing = ResidualStreams(hidden * streams * (2 * rank + streams))
    gated, delta = _qwen_attention(reader), gated_delta(reader)
    layers: list[Layer] = []
    for number, recurrent in enumerate(is_recurrent(reader, labels)):
        layers += [delta if recurrent else gated, qwen_feed_forward(reader, number), mixing]
    head = (gated, layers[-2]) * head_depth(reader)
    ngrams = sorted({one for one in reader.items("ple_layer_ids", of=int) or () if 0 < one <= count})
    tokens = reader.count("ngram_size", default=3)
    for place, _ in enumerate(ngrams):
        layers.append(
            NgramEmbedding(
                hidden,
                streams,
                reader.count("ple_embed_dim", default=hidden),
                reader.count("ple_conv_kernel_size", default=4),
                tokens,
                context=0 if place else tokens - 1,
            )
        )
    return Architecture(tuple(layers), state_dtype(reader), DELTA_CHUNK_TOKENS, head=head)


def _qwen_attention(reader: ConfigReader) -> Layer:
    gated = attention(reader, output_gate=reader.flag("attn_output_gate", default=True))
    if reader.value("indexer_n_heads") is None:
        return gated
    heads, shared = reader.count("indexer_n_heads"), reader.count("indexer_kv_heads")
    dim, pooled = reader.count("indexer_head_dim"), reader.count("indexer_compress_ratio")
    weights, kept = gated.hidden * (heads + shared) * dim, shared * dim * 2 // pooled
    index = Index(heads, dim, pooled, reader.count("indexer_budget"), weights, kept)
    return SparseAttention(**vars(gated), index=index)
