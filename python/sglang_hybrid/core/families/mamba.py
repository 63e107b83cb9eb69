"""Mamba-1 and Mamba-2, beside attention or alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang_hybrid.core.architecture import (
    Architecture,
    attention,
    depth,
    expanded,
    is_recurrent,
    layer_labels,
    mamba1,
    mamba2,
    state_dtype,
)
from sglang_hybrid.core.layers import Attention, Layer, Mlp, Moe
from sglang_hybrid.core.reading import ConfigReader
from sglang_hybrid.core.recurrent import DELTA_CHUNK_TOKENS


def nemotron_h(reader: ConfigReader, blocks: Sequence[Mapping[str, Any]] | None = None) -> Architecture:
    """Nemotron-H and Nemotron 3: one mixer per layer, `M` Mamba-2, `*` attention, `-` MLP, `E` experts, no gates.

    `blocks` has what differs in a layer's experts, one for each layer.
    """
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    labels = reader.items("layers_block_type", of=str)
    if labels is not None:  # the multimodal checkpoints use general names
        labels = [{"linear_attention": "mamba", "full_attention": "attention"}.get(label, label) for label in labels]
    if labels is None:
        labels = [names.get(letter, letter) for letter in reader.text("hybrid_override_pattern", default="")]
    if not labels or set(labels) - set(names.values()):
        value = reader.value("layers_block_type", "hybrid_override_pattern")
        raise reader.wrong("hybrid_override_pattern", "a non-empty sequence of M, *, - and E", value)
    hidden = reader.count("hidden_size")
    inner = reader.count("mamba_num_heads") * reader.count("mamba_head_dim")
    mixer = mamba2(reader, inner, groups_key="n_groups")  # SGLang's layers read mamba_n_groups
    kinds: dict[str, Layer] = {"mamba": mixer, "attention": attention(reader)}
    if "mlp" in labels:
        kinds["mlp"] = Mlp(hidden, reader.count("intermediate_size"), gated=False)
    blocks = [{}] * len(labels) if blocks is None else blocks
    if len(blocks) != len(labels):
        raise reader.wrong("block_configs", f"one for each of the {len(labels)} layers", len(blocks))
    layers = [
        _nemotron_experts(reader, block) if label == "moe" else kinds[label]
        for label, block in zip(labels, blocks, strict=True)
    ]
    return Architecture(tuple(layers), state_dtype(reader), mixer.chunk)


def _nemotron_experts(reader: ConfigReader, block: Mapping[str, Any]) -> Moe:
    """Experts of one layer; what `block` says of it counts before what `reader` says of all."""
    reader = ConfigReader({**reader.config, **block}, reader.architecture)
    shared = reader.count("n_shared_experts", default=1, minimum=0)
    return Moe(
        reader.count("hidden_size"),
        reader.count("moe_intermediate_size"),
        reader.count("n_routed_experts"),
        reader.count("num_experts_per_tok"),
        shared_intermediate=shared and shared * reader.count("moe_shared_expert_intermediate_size"),
        gated=False,
        latent=reader.count("moe_latent_size", default=0, minimum=0),
    )


def nemotron_h_puzzle(reader: ConfigReader) -> Architecture:
    """Nemotron-H with other experts in each layer; SGLang reads nothing else of `block_configs`."""
    blocks = reader.items("block_configs", of=dict)
    if blocks is None:
        raise reader.wrong("block_configs", "a list of mappings", None)
    return nemotron_h(reader, blocks)


def nemotron_h_multimodal(reader: ConfigReader) -> Architecture:
    """Nemotron-H inside a multimodal model, where SGLang looks for a chunk size outside the text part."""
    return replace(nemotron_h(reader), chunk_tokens=DELTA_CHUNK_TOKENS)


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
    for index in range(depth(reader)):
        is_sparse = experts > 1 and index % expert_period == expert_offset
        layers += [heads if index % attention_period == attention_offset else mixer, sparse if is_sparse else dense]
    return Architecture(tuple(layers), chunk_tokens=DELTA_CHUNK_TOKENS)


def falcon_h1(reader: ConfigReader) -> Architecture:
    """Falcon-H1: attention and Mamba-2 side by side in every layer, then an MLP."""
    mixer = mamba2(reader, inner=reader.count("mamba_d_ssm", default=expanded(reader)))
    block = (attention(reader), mixer, Mlp(reader.count("hidden_size"), reader.count("intermediate_size")))
    return Architecture(block * depth(reader), state_dtype(reader), mixer.chunk)


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
    labels = layer_labels(reader) or ["mamba"] * depth(reader)
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
    for index in range(depth(reader)):
        layers += [heads if index in chosen else mixer, feed_forward]
    return Architecture(tuple(layers), chunk_tokens=mixer.chunk)


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
    return Architecture((mixer,) * depth(reader), chunk_tokens=mixer.chunk)


def pure_mamba1(reader: ConfigReader) -> Architecture:
    """Mamba and Falcon-Mamba; SGLang saves states on a grid of 256 tokens, the kernel has no chunks of its own."""
    inner = reader.count("intermediate_size", default=expanded(reader))
    mixer = mamba1(reader, inner, rank_key="time_step_rank")
    return Architecture((mixer,) * depth(reader), chunk_tokens=256)
