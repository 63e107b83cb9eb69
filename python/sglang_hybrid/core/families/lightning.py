"""Lightning attention, a decay that depends on nothing but head and layer: Ling and Ring, MiniCPM-SALA, MiniMax."""

from sglang_hybrid.core.architecture import (
    Architecture,
    attention,
    depth,
    experts_after_the_first,
    latent_attention,
    layer_labels,
)
from sglang_hybrid.core.layers import Layer, Mlp, Moe
from sglang_hybrid.core.reading import ConfigReader
from sglang_hybrid.core.recurrent import DELTA_CHUNK_TOKENS, KimiDeltaAttention, LightningAttention

_BAILING = {
    "head_dim": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 256,
    "num_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
}
"""What SGLang's configuration class takes for keys that are absent."""

_MIXERS = {
    **dict.fromkeys(("minicpm4", "minicpm", "standard", "attention", "attn"), False),
    **dict.fromkeys(("lightning", "lightning_attn", "lightning-attn"), True),
}


def bailing_hybrid(reader: ConfigReader) -> Architecture:
    """Ling and Ring 2.5 (lightning attention) and Ling 3 (KDA), with latent attention every `layer_group_size` layers.

    A short convolution tells the two apart, as it does for SGLang, which reads `mamba_ssm_dtype` for neither. A list
    `layer_group_size` marks recurrent layers with 1.
    """
    reader = reader.with_defaults(_BAILING)
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    head_dim = reader.count("head_dim", default=hidden // heads)
    gates = {"element_wise": heads * reader.count("v_head_dim"), "head_wise": heads}
    if reader.value("short_conv_kernel_size") is None:
        linear: Layer = LightningAttention(hidden, heads, head_dim, output_gate=True)
        latent = latent_attention(reader)
    else:
        full = reader.flag("no_kda_lora", default=False)
        kernel = reader.count("short_conv_kernel_size", minimum=2)
        linear = KimiDeltaAttention(hidden, heads, head_dim, kernel, full_gate=full, full_decay=full)
        gate = reader.text("gated_attention_proj_granularity_type", default="")
        latent = latent_attention(reader, gates.get(gate, 0))
    layers: list[Layer] = []
    feed_forwards = experts_after_the_first(reader, "num_experts", "num_shared_experts")
    for recurrent, feed_forward in zip(_bailing_recurrent(reader), feed_forwards, strict=True):
        layers += [linear if recurrent else latent, feed_forward]
    return Architecture(tuple(layers), chunk_tokens=DELTA_CHUNK_TOKENS)


def _bailing_recurrent(reader: ConfigReader) -> list[bool]:
    value, count = reader.value("layer_group_size"), depth(reader)
    if not isinstance(value, list | tuple):
        period = reader.count("layer_group_size", default=1)
        return [(index + 1) % period != 0 for index in range(count)]
    if len(value) != count:
        raise reader.wrong("layer_group_size", f"a number, or a list as long as num_hidden_layers={count}", value)
    return [item == 1 for item in value]


def bailing_linear(reader: ConfigReader) -> Architecture:
    """Ring and Ling linear 2.0: lightning attention, grouped-query attention every `layer_group_size` layers.

    Layers beyond the last whole group are attention too.
    """
    hidden, heads = reader.count("hidden_size"), attention(reader)
    linear = LightningAttention(hidden, heads.heads, heads.head_dim, output_gate=True)
    period, count = reader.count("layer_group_size"), depth(reader)
    layers: list[Layer] = []
    for index, feed_forward in enumerate(experts_after_the_first(reader, "num_experts", "num_shared_experts")):
        is_attention = (index + 1) % period == 0 or index >= count // period * period
        layers += [heads if is_attention else linear, feed_forward]
    return Architecture(tuple(layers), chunk_tokens=DELTA_CHUNK_TOKENS)


def minicpm_sala(reader: ConfigReader) -> Architecture:
    """MiniCPM-SALA: lightning attention, and attention that is sparse beyond `sparse_config.dense_len` tokens.

    Sparse attention is priced as full: its KV takes the same bytes, its FLOPs are fewer in long prompts.
    """
    count = depth(reader)
    mixers = reader.items("mixer_types", of=str) or ["minicpm4"]
    for mixer in mixers:
        if mixer not in _MIXERS:
            raise reader.wrong("mixer_types", f"made of {', '.join(_MIXERS)}", mixer)
    if len(mixers) > count:
        raise reader.wrong("mixer_types", f"a list of at most num_hidden_layers={count} names", len(mixers))
    heads = attention(reader, output_gate=reader.flag("attn_use_output_gate", default=False))
    linear_heads = reader.count("lightning_nh", default=heads.heads)
    if reader.count("lightning_nkv", default=heads.kv_heads) != linear_heads and any(map(_MIXERS.get, mixers)):
        raise reader.wrong("lightning_nkv", f"lightning_nh={linear_heads}", reader.value("lightning_nkv"))
    linear = LightningAttention(
        heads.hidden,
        linear_heads,
        reader.count("lightning_head_dim", default=heads.head_dim),
        output_gate=reader.flag("use_output_gate", default=False),
    )
    feed_forward = Mlp(heads.hidden, reader.count("intermediate_size"))
    layers: list[Layer] = []
    for index in range(count):
        layers += [linear if _MIXERS[mixers[index % len(mixers)]] else heads, feed_forward]
    return Architecture(tuple(layers), chunk_tokens=DELTA_CHUNK_TOKENS)


def minimax(reader: ConfigReader) -> Architecture:
    """MiniMax-Text-01 and M1: lightning attention, attention in every eighth layer or where the list says, experts."""
    heads = attention(reader)
    labels = layer_labels(reader)
    if labels is None:
        kinds = reader.items("attn_type_list", of=int)
        if kinds is None or len(kinds) != depth(reader):
            raise reader.wrong("layer_types", "a list of linear_attention and full_attention, one per layer", kinds)
        labels = ["full_attention" if kind else "linear_attention" for kind in kinds]
    linear = LightningAttention(heads.hidden, heads.heads, heads.head_dim, output_gate=True)
    experts, top_k = reader.count("num_local_experts"), reader.count("num_experts_per_tok")
    feed_forward = Moe(heads.hidden, reader.count("intermediate_size"), experts, top_k)
    kinds_of = {"linear_attention": linear, "full_attention": heads}
    layers: list[Layer] = []
    for label in labels:
        if label not in kinds_of:
            raise reader.wrong("layer_types", "a list of linear_attention and full_attention, one per layer", label)
        layers += [kinds_of[label], feed_forward]
    return Architecture(tuple(layers), chunk_tokens=reader.count("block_size", default=256))
