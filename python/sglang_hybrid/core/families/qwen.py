"""Qwen: gated DeltaNet beside gated attention (Qwen3-Next, Qwen3.5), and attention only."""

from sglang_hybrid.core.architecture import (
    Architecture,
    attention,
    depth,
    gated_delta,
    head_depth,
    is_recurrent,
    layer_labels,
    state_dtype,
)
from sglang_hybrid.core.layers import Layer, Mlp, Moe
from sglang_hybrid.core.reading import ConfigReader
from sglang_hybrid.core.recurrent import DELTA_CHUNK_TOKENS

_DENSE = ("qwen3_5", "qwen3_5_text")


def qwen_feed_forward(reader: ConfigReader, index: int) -> Layer:
    """The sparse or dense feed-forward of layer `index` in Qwen3-Next, Qwen3.5 and Qwen3-MoE.

    Qwen3.5 is dense or not by its name: SGLang's configuration of a dense one has experts that no layer has.
    """
    hidden = reader.count("hidden_size")
    if reader.value("model_type") in _DENSE:
        return Mlp(hidden, reader.count("intermediate_size"))
    dense_layers = reader.items("mlp_only_layers", of=int) or []
    experts = reader.count("num_experts", "num_local_experts", default=0, minimum=0)
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
    labels = layer_labels(reader) or interval_labels(reader)
    delta = gated_delta(reader)
    gated = attention(reader, output_gate=reader.flag("attn_output_gate", default=True))
    layers: list[Layer] = []
    for index, recurrent in enumerate(is_recurrent(reader, labels)):
        layers += [delta if recurrent else gated, qwen_feed_forward(reader, index)]
    head = (gated, layers[-1]) * head_depth(reader)
    return Architecture(tuple(layers), state_dtype(reader), DELTA_CHUNK_TOKENS, head=head)


def interval_labels(reader: ConfigReader) -> list[str]:
    """The kinds of layers where the configuration lists none: attention every `full_attention_interval` layers."""
    interval = reader.count("full_attention_interval", default=4)
    return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(depth(reader))]


def transformer(reader: ConfigReader) -> Architecture:
    """Attention only: Llama, Mistral, Qwen2, Qwen3 (dense and experts), Mixtral. No recurrent state, no grid."""
    if "sliding_attention" in (reader.items("layer_types", of=str) or []):
        raise reader.wrong("layer_types", "free of sliding windows, whose KV does not grow with the prompt", "sliding")
    heads, hidden = attention(reader), reader.count("hidden_size")
    # Mixtral; transformers writes Qwen3-MoE's number of experts under this name too
    is_mixtral = reader.value("num_local_experts") is not None and reader.value("moe_intermediate_size") is None
    layers: list[Layer] = []
    for index in range(depth(reader)):
        if is_mixtral:
            experts, top_k = reader.count("num_local_experts"), reader.count("num_experts_per_tok")
            feed_forward: Layer = Moe(hidden, reader.count("intermediate_size"), experts, top_k)
        else:
            feed_forward = qwen_feed_forward(reader, index)
        layers += [heads, feed_forward]
    return Architecture(tuple(layers))
