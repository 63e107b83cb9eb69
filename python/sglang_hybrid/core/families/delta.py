"""Delta rules other than Qwen's: KDA beside latent attention, JetBlocks, gated DeltaNet beside latent attention."""

from sglang_hybrid.core.architecture import (
    Architecture,
    attention,
    depth,
    experts_after_the_first,
    gated_delta,
    is_recurrent,
    latent_attention,
    layer_labels,
    state_dtype,
)
from sglang_hybrid.core.layers import Layer, Mlp
from sglang_hybrid.core.reading import ConfigReader
from sglang_hybrid.core.recurrent import DELTA_CHUNK_TOKENS, JetBlock, KimiDeltaAttention

_GIGACHAT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 896,
    "first_k_dense_replace": 1,
}
"""What SGLang's configuration class takes for keys that are absent."""


def kimi_linear(reader: ConfigReader) -> Architecture:
    """Kimi-Linear and the text part of Kimi K3: KDA layers and latent attention, listed one-based; experts.

    SGLang does not read `mamba_ssm_dtype` for this family.
    """
    linear = reader.nested("linear_attn_config")
    kda_layers = linear.items("kda_layers", of=int) or []
    delta = KimiDeltaAttention(
        reader.count("hidden_size"),
        linear.count("num_heads"),
        linear.count("head_dim"),
        linear.count("short_conv_kernel_size", minimum=2),
        full_gate=linear.flag("use_full_rank_gate", default=False),
    )
    gated = reader.flag("mla_use_output_gate", default=False)
    gate_width = reader.count("num_attention_heads") * reader.count("v_head_dim") if gated else 0
    latent = latent_attention(reader, gate_width)
    layers: list[Layer] = []
    for index, feed_forward in enumerate(experts_after_the_first(reader, "num_experts", "num_shared_experts")):
        layers += [delta if index + 1 in kda_layers else latent, feed_forward]
    return Architecture(tuple(layers), chunk_tokens=DELTA_CHUNK_TOKENS)


def jet_nemotron(reader: ConfigReader) -> Architecture:
    """Jet-Nemotron: `jet` layers with a gated delta rule; `attn` and `swa` layers, whose KV SGLang keeps alike.

    A window (`swa`) is priced as full attention: its KV takes the same bytes, its FLOPs are fewer beyond the window.
    """
    jet = reader.nested("efficient_attention_config").nested("jet")
    k_dim = jet.count("head_dim")
    block = JetBlock(
        hidden=reader.count("hidden_size"),
        k_heads=jet.count("num_heads"),
        v_heads=jet.count("num_heads"),
        k_dim=k_dim,
        v_dim=int(k_dim * jet.number("expand_v")),
        conv_kernel=jet.count("conv_size", minimum=2),
        reduction=jet.count("dconv_generator_reduction"),
    )
    kinds: dict[str, Layer] = {"jet": block, "attn": attention(reader), "swa": attention(reader)}
    feed_forward = Mlp(reader.count("hidden_size"), reader.count("intermediate_size"))
    labels = layer_labels(reader)
    if labels is None:
        raise reader.wrong("layer_types", "a list of jet, attn and swa", None)
    layers: list[Layer] = []
    for label in labels:
        if label not in kinds:
            raise reader.wrong("layer_types", "a list of jet, attn and swa", label)
        layers += [kinds[label], feed_forward]
    return Architecture(tuple(layers), state_dtype(reader), DELTA_CHUNK_TOKENS)


def gigachat(reader: ConfigReader) -> Architecture:
    """GigaChat 3.5: gated DeltaNet and gated latent attention, experts after the first layers."""
    reader = reader.with_defaults(_GIGACHAT)
    labels = layer_labels(reader)
    if labels is None:
        attended = reader.items("full_attention_layers", of=int) or []
        labels = ["attention" if index in attended else "linear_attention" for index in range(depth(reader))]
    gated = reader.flag("gated_attention", default=True)
    gate_width = reader.count("num_attention_heads") * reader.count("v_head_dim") if gated else 0
    latent, delta = latent_attention(reader, gate_width), gated_delta(reader)
    feed_forwards = experts_after_the_first(reader, "n_routed_experts", "n_shared_experts")
    layers: list[Layer] = []
    for recurrent, feed_forward in zip(is_recurrent(reader, labels), feed_forwards, strict=True):
        layers += [delta if recurrent else latent, feed_forward]
    return Architecture(tuple(layers), state_dtype(reader), DELTA_CHUNK_TOKENS)
