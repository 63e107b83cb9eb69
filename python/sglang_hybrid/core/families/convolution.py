"""Models whose only state is convolution windows: LFM2 and Zaya."""

from sglang_hybrid.core.architecture import Architecture, attention, depth, layer_labels, state_dtype
from sglang_hybrid.core.convolution import CompressedAttention, ShortConvolution
from sglang_hybrid.core.layers import Layer, Mlp, Moe
from sglang_hybrid.core.reading import ConfigReader


def lfm2(reader: ConfigReader) -> Architecture:
    """LFM2: gated short convolutions, attention at `full_attn_idxs` or where `layer_types` says, an MLP each."""
    labels = layer_labels(reader)
    if labels is None:
        attended = reader.items("full_attn_idxs", of=int)
        if attended is None:
            raise reader.wrong("layer_types", "a list of conv and full_attention", None)
        labels = ["full_attention" if index in attended else "conv" for index in range(depth(reader))]
    feed_forward = Mlp(
        reader.count("hidden_size"), _adjusted(reader, reader.count("block_ff_dim", "intermediate_size"))
    )
    return _short_convolutions(reader, labels, [feed_forward] * len(labels))


def _adjusted(reader: ConfigReader, width: int) -> int:
    """The MLP's width: two thirds of the configured one, in whole multiples, unless switched off."""
    if not reader.flag("block_auto_adjust_ff_dim", default=True):
        return width
    unit = reader.count("block_multiple_of", default=256)
    width = int(reader.number("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
    return -(-width // unit) * unit


def lfm2_moe(reader: ConfigReader) -> Architecture:
    """LFM2 with experts after the first `num_dense_layers` layers."""
    labels = layer_labels(reader)
    if labels is None:
        raise reader.wrong("layer_types", "a list of conv and full_attention", None)
    hidden = reader.count("hidden_size")
    dense = Mlp(hidden, reader.count("intermediate_size"))
    experts, top_k = reader.count("num_experts"), reader.count("num_experts_per_tok")
    sparse = Moe(hidden, reader.count("moe_intermediate_size"), experts, top_k)
    first = reader.count("num_dense_layers", default=2, minimum=0)
    return _short_convolutions(reader, labels, [dense if i < first else sparse for i in range(len(labels))])


def _short_convolutions(reader: ConfigReader, labels: list[str], feed_forwards: list[Layer]) -> Architecture:
    convolution = ShortConvolution(reader.count("hidden_size"), reader.count("conv_L_cache", default=3, minimum=2))
    kinds: dict[str, Layer] = {"conv": convolution, "short_conv": convolution, "full_attention": attention(reader)}
    layers: list[Layer] = []
    for label, feed_forward in zip(labels, feed_forwards, strict=True):
        if label not in kinds:
            raise reader.wrong("layer_types", f"made of {', '.join(kinds)}", label)
        layers += [kinds[label], feed_forward]
    return Architecture(tuple(layers), state_dtype(reader))


def zaya(reader: ConfigReader) -> Architecture:
    """ZAYA1: attention behind convolutions (CCA) in one half of the layers, experts behind a router MLP in the other.

    Configurations as SGLang 0.5.21 reads them. `zaya_layers` lists layers as `a` or a number of experts; without it
    even layers attend. `ffn_hidden_size` counts gate and up together. One expert of the router skips the layer.
    """
    listed = reader.value("zaya_layers")
    if listed is not None and not (isinstance(listed, list) and all(isinstance(item, str | int) for item in listed)):
        raise reader.wrong("zaya_layers", "a list of 'a' and numbers of experts", listed)
    attends = [item == "a" for item in listed] if listed else [index % 2 == 0 for index in range(depth(reader))]
    hidden = reader.count("hidden_size")
    mixer = CompressedAttention(
        hidden=hidden,
        heads=_first(reader, "cca_num_q_heads", "num_attention_heads"),
        kv_heads=_first(reader, "num_query_groups_list", "num_query_groups", "num_key_value_heads"),
        head_dim=reader.count("head_dim", "kv_channels"),
        kernels=(reader.count("cca_time0", default=2), reader.count("cca_time1", default=2)),
    )
    experts = reader.count("num_experts")
    width = _first(reader, "zaya_mlp_expansion", default=256)
    choices = experts + reader.flag("zaya_use_mod", default=True)
    sparse = Moe(
        hidden,
        _first(reader, "ffn_hidden_size_list", "ffn_hidden_size") // 2,
        experts,
        reader.count("moe_router_topk", default=1),
        router=hidden * width + 2 * width * width + width * choices,
    )
    return Architecture(tuple(mixer if attend else sparse for attend in attends), state_dtype(reader))


def _first(reader: ConfigReader, *keys: str, default: int | None = None) -> int:
    """A count, or the first one of a list with a value for each layer that is not 0 (0: a layer of the other kind)."""
    for key in keys:
        value = reader.value(key)
        if isinstance(value, list):
            chosen = next((item for item in value if item), None)
            if chosen is not None:
                return ConfigReader({key: chosen}, reader.architecture).count(key)
        elif value is not None:
            return reader.count(key)
    return reader.count(*keys, default=default)
