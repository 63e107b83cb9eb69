"""Which layers a Hugging Face configuration describes, one function per model family.

Field names and defaults follow the configuration classes of transformers and SGLang; the resulting pool sizes are
compared with SGLang's own in tests/conformance/test_spec_against_sglang.py, the weights with transformers' modules.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sglang_hybrid.core.architecture import (
    Architecture,
    attention,
    expanded,
    is_recurrent,
    layer_labels,
    mamba1,
    mamba2,
    state_dtype,
)
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.layers import Attention, LatentAttention, Layer, Mlp, Moe
from sglang_hybrid.core.reading import ConfigReader
from sglang_hybrid.core.recurrent import DELTA_CHUNK_TOKENS, GatedDeltaNet, KimiDeltaAttention


def qwen_feed_forward(reader: ConfigReader, index: int) -> Layer:
    """The sparse or dense feed-forward of layer `index` in Qwen3-Next, Qwen3.5 and Qwen3-MoE."""
    hidden = reader.count("hidden_size")
    dense_layers = reader.items("mlp_only_layers", of=int) or []
    experts = reader.count("num_experts", default=0, minimum=0)
    if not experts or index in dense_layers or (index + 1) % reader.count("decoder_sparse_step", default=1):
        return Mlp(hidden, reader.count("intermediate_size"))
    shared = reader.count("shared_expert_intermediate_size", default=0, minimum=0)
    return Moe(
        hidden,
        reader.count("moe_intermediate_size"),
        experts,
        reader.count("num_experts_per_tok"),
        shared_intermediate=shared,
        shared_gate=shared > 0,
    )


def qwen_hybrid(reader: ConfigReader) -> Architecture:
    """Qwen3-Next and Qwen3.5: gated DeltaNet, and gated attention every `full_attention_interval` layers."""
    labels = layer_labels(reader)
    if labels is None:
        interval = reader.count("full_attention_interval", default=4)
        depth = reader.count("num_hidden_layers")
        labels = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(depth)]
    delta = GatedDeltaNet(
        hidden=reader.count("hidden_size"),
        k_heads=reader.count("linear_num_key_heads"),
        v_heads=reader.count("linear_num_value_heads"),
        k_dim=reader.count("linear_key_head_dim"),
        v_dim=reader.count("linear_value_head_dim"),
        conv_kernel=reader.count("linear_conv_kernel_dim", default=4, minimum=2),
    )
    gated = attention(reader, output_gate=reader.flag("attn_output_gate", default=True))
    layers: list[Layer] = []
    for index, recurrent in enumerate(is_recurrent(reader, labels)):
        layers += [delta if recurrent else gated, qwen_feed_forward(reader, index)]
    return Architecture(tuple(layers), state_dtype(reader), DELTA_CHUNK_TOKENS)


def nemotron_h(reader: ConfigReader) -> Architecture:
    """Nemotron-H and Nemotron 3: one mixer per layer, `M` Mamba-2, `*` attention, `-` MLP, `E` experts, no gates."""
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    labels = reader.items("layers_block_type", of=str)
    if labels is None:
        labels = [names.get(letter, letter) for letter in reader.text("hybrid_override_pattern", default="")]
    if not labels or set(labels) - set(names.values()):
        value = reader.value("layers_block_type", "hybrid_override_pattern")
        raise reader.wrong("hybrid_override_pattern", "a non-empty sequence of M, *, - and E", value)
    hidden = reader.count("hidden_size")
    inner = reader.count("mamba_num_heads") * reader.count("mamba_head_dim")
    mixer = mamba2(reader, inner)
    kinds: dict[str, Layer] = {"mamba": mixer, "attention": attention(reader)}
    if "mlp" in labels:
        kinds["mlp"] = Mlp(hidden, reader.count("intermediate_size"), gated=False)
    if "moe" in labels:
        shared = reader.count("n_shared_experts", default=1, minimum=0)
        kinds["moe"] = Moe(
            hidden,
            reader.count("moe_intermediate_size"),
            reader.count("n_routed_experts"),
            reader.count("num_experts_per_tok"),
            shared_intermediate=shared and shared * reader.count("moe_shared_expert_intermediate_size"),
            gated=False,
            latent=reader.count("moe_latent_size", default=0, minimum=0),
        )
    return Architecture(tuple(kinds[label] for label in labels), state_dtype(reader), mixer.chunk)


def jamba(reader: ConfigReader) -> Architecture:
    """Jamba: Mamba-1 with one attention layer per `attn_layer_period`, experts every `expert_layer_period` layers."""
    hidden = reader.count("hidden_size")
    mixer = mamba1(reader, inner=expanded(reader), rank_key="mamba_dt_rank")
    heads = attention(reader)
    dense = Mlp(hidden, reader.count("intermediate_size"))
    experts = reader.count("num_experts", "num_local_experts", default=16)
    sparse = Moe(hidden, dense.intermediate, experts, reader.count("num_experts_per_tok", default=2))
    attention_period = reader.count("attn_layer_period", default=8)
    attention_offset = reader.count("attn_layer_offset", default=4, minimum=0)
    expert_period = reader.count("expert_layer_period", default=2)
    expert_offset = reader.count("expert_layer_offset", default=1, minimum=0)
    layers: list[Layer] = []
    for index in range(reader.count("num_hidden_layers")):
        is_sparse = experts > 1 and index % expert_period == expert_offset
        layers += [heads if index % attention_period == attention_offset else mixer, sparse if is_sparse else dense]
    return Architecture(tuple(layers), chunk_tokens=DELTA_CHUNK_TOKENS)


def falcon_h1(reader: ConfigReader) -> Architecture:
    """Falcon-H1: attention and Mamba-2 side by side in every layer, then an MLP."""
    mixer = mamba2(reader, inner=reader.count("mamba_d_ssm", default=expanded(reader)))
    block = (attention(reader), mixer, Mlp(reader.count("hidden_size"), reader.count("intermediate_size")))
    return Architecture(block * reader.count("num_hidden_layers"), state_dtype(reader), mixer.chunk)


def granite_hybrid(reader: ConfigReader) -> Architecture:
    """Granite 4 hybrid: Mamba-2 or attention, then experts beside a shared MLP (the shared MLP alone if no experts).

    SGLang does not read `mamba_ssm_dtype` for this family.
    """
    hidden = reader.count("hidden_size")
    shared = reader.count("shared_intermediate_size")
    experts = reader.count("num_local_experts", default=0, minimum=0)
    feed_forward: Layer = Mlp(hidden, shared)
    if experts:
        top_k = reader.count("num_experts_per_tok")
        feed_forward = Moe(hidden, reader.count("intermediate_size"), experts, top_k, shared_intermediate=shared)
    labels = layer_labels(reader) or ["mamba"] * reader.count("num_hidden_layers")
    flags = is_recurrent(reader, labels)
    mixer = mamba2(reader, inner=expanded(reader)) if any(flags) else None
    heads = attention(reader)
    layers = [layer for flag in flags for layer in (mixer if flag and mixer else heads, feed_forward)]
    return Architecture(tuple(layers), chunk_tokens=mixer.chunk if mixer else 1)


def bamba(reader: ConfigReader) -> Architecture:
    """Bamba: Mamba-2, attention at `attn_layer_indices`, an MLP in every layer."""
    mixer, heads = mamba2(reader, inner=expanded(reader)), attention(reader)
    feed_forward = Mlp(reader.count("hidden_size"), reader.count("intermediate_size"))
    chosen = reader.items("attn_layer_indices", of=int) or []
    layers: list[Layer] = []
    for index in range(reader.count("num_hidden_layers")):
        layers += [heads if index in chosen else mixer, feed_forward]
    return Architecture(tuple(layers), chunk_tokens=mixer.chunk)


def kimi_linear(reader: ConfigReader) -> Architecture:
    """Kimi-Linear: KDA layers and latent attention, listed one-based in `linear_attn_config`; experts after the first.

    SGLang does not read `mamba_ssm_dtype` for this family.
    """
    hidden = reader.count("hidden_size")
    linear = reader.nested("linear_attn_config")
    kda_layers = linear.items("kda_layers", of=int) or []
    delta = KimiDeltaAttention(
        hidden, linear.count("num_heads"), linear.count("head_dim"), linear.count("short_conv_kernel_size", minimum=2)
    )
    latent = LatentAttention(
        hidden=hidden,
        heads=reader.count("num_attention_heads"),
        nope_dim=reader.count("qk_nope_head_dim"),
        rope_dim=reader.count("qk_rope_head_dim", minimum=0),
        v_dim=reader.count("v_head_dim"),
        kv_rank=reader.count("kv_lora_rank"),
        q_rank=reader.count("q_lora_rank", default=0, minimum=0),
    )
    dense = Mlp(hidden, reader.count("intermediate_size"))
    width = reader.count("moe_intermediate_size", default=0, minimum=0)
    experts = reader.count("num_experts", default=0, minimum=0)
    shared = width * reader.count("num_shared_experts", default=0, minimum=0)
    first_sparse = reader.count("first_k_dense_replace", default=0, minimum=0)
    frequency = reader.count("moe_layer_freq", default=1)
    sparse: Layer = dense
    if experts:
        top_k = reader.count("num_experts_per_token", "num_experts_per_tok")
        sparse = Moe(hidden, width, experts, top_k, shared_intermediate=shared)
    layers: list[Layer] = []
    for index in range(reader.count("num_hidden_layers")):
        is_sparse = index >= first_sparse and index % frequency == 0
        layers += [delta if index + 1 in kda_layers else latent, sparse if is_sparse else dense]
    return Architecture(tuple(layers), chunk_tokens=DELTA_CHUNK_TOKENS)


def zamba2(reader: ConfigReader) -> Architecture:
    """Zamba2: Mamba-2 in every layer; `hybrid` layers run a shared transformer block on 2D channels before it.

    Sharing saves weights, not work or KV: each call of the block has its own KV and its own linear map D x D.
    """
    hidden = reader.count("hidden_size")
    labels = layer_labels(reader)
    if labels is None:
        raise reader.wrong("layers_block_type", "a list of mamba and hybrid", None)
    heads = reader.count("num_attention_heads")
    rank = reader.count("adapter_rank", default=128)
    adapters = 3 * 2 * rank * 2 * hidden if reader.flag("use_shared_attention_adapter", default=False) else 0
    shared = Attention(
        hidden=2 * hidden,
        heads=heads,
        kv_heads=reader.count("num_key_value_heads", default=heads),
        head_dim=reader.count("attention_head_dim", default=2 * hidden // heads),
        out=hidden,
        extra_weights=adapters + hidden * hidden,
    )
    width = reader.count("intermediate_size", default=4 * hidden)
    feed_forward = Mlp(hidden, width, extra_weights=rank * (hidden + 2 * width))
    mixer = mamba2(reader, inner=expanded(reader), chunk_key="chunk_size")
    layers: list[Layer] = []
    for label, recurrent in zip(labels, is_recurrent(reader, labels), strict=True):
        if not recurrent and label != "hybrid":
            raise reader.wrong("layers_block_type", "a list of mamba and hybrid", label)
        layers += [mixer] if recurrent else [shared, feed_forward, mixer]
    return Architecture(tuple(layers), chunk_tokens=mixer.chunk)


def pure_mamba2(reader: ConfigReader) -> Architecture:
    """Mamba-2 without attention (Mamba-Codestral); SGLang does not read `mamba_ssm_dtype` for this family."""
    inner = reader.count("num_heads") * reader.count("head_dim")
    mixer = mamba2(reader, inner, chunk_key="chunk_size")
    return Architecture((mixer,) * reader.count("num_hidden_layers"), chunk_tokens=mixer.chunk)


def pure_mamba1(reader: ConfigReader) -> Architecture:
    """Mamba and Falcon-Mamba; SGLang saves states on a grid of 256 tokens, the kernel has no chunks of its own."""
    inner = reader.count("intermediate_size", default=expanded(reader))
    mixer = mamba1(reader, inner, rank_key="time_step_rank")
    return Architecture((mixer,) * reader.count("num_hidden_layers"), chunk_tokens=256)


def transformer(reader: ConfigReader) -> Architecture:
    """Attention only: Llama, Mistral, Qwen2, Qwen3 (dense and experts), Mixtral. No recurrent state, no grid."""
    if "sliding_attention" in (reader.items("layer_types", of=str) or []):
        raise reader.wrong("layer_types", "free of sliding windows, whose KV does not grow with the prompt", "sliding")
    heads, hidden = attention(reader), reader.count("hidden_size")
    layers: list[Layer] = []
    for index in range(reader.count("num_hidden_layers")):
        feed_forward = qwen_feed_forward(reader, index)
        if reader.value("num_local_experts") is not None:  # Mixtral
            experts, top_k = reader.count("num_local_experts"), reader.count("num_experts_per_tok")
            feed_forward = Moe(hidden, reader.count("intermediate_size"), experts, top_k)
        layers += [heads, feed_forward]
    return Architecture(tuple(layers))


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a configuration; the text part if it is nested. Raises ConfigError if unsupported."""
    named = ConfigReader(config, "model")
    classes = named.items("architectures", of=str)
    model_type = named.text("model_type", default="")
    shown = classes[0] if classes else model_type
    family = FAMILIES.get(model_type)
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"unsupported architecture {shown or 'without model_type'}, supported model types are {supported}: "
            f"{model_type!r}"
        )
    reader = ConfigReader(config, shown)
    text = reader.nested("text_config") if reader.value("text_config") is not None else reader
    return replace(family(text), context_tokens=text.count("max_position_embeddings", default=0))


FAMILIES: Mapping[str, Callable[[ConfigReader], Architecture]] = {
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "falcon_mamba": pure_mamba1,
    "granitemoehybrid": granite_hybrid,
    "jamba": jamba,
    "kimi_linear": kimi_linear,
    "llama": transformer,
    "mamba": pure_mamba1,
    "mamba2": pure_mamba2,
    "mistral": transformer,
    "mixtral": transformer,
    "nemotron_h": nemotron_h,
    "qwen2": transformer,
    "qwen3": transformer,
    "qwen3_5": qwen_hybrid,
    "qwen3_5_moe": qwen_hybrid,
    "qwen3_5_moe_text": qwen_hybrid,
    "qwen3_5_text": qwen_hybrid,
    "qwen3_moe": transformer,
    "qwen3_next": qwen_hybrid,
    "zamba2": zamba2,
}
