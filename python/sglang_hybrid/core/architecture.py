"""Parts that several model families share, read from a Hugging Face configuration."""

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_hybrid.core.layers import Attention, Layer
from sglang_hybrid.core.reading import ConfigReader
from sglang_hybrid.core.recurrent import Mamba1, Mamba2

ATTENTION_LABELS = frozenset({"attention", "full_attention", "hybrid"})
RECURRENT_LABELS = frozenset({"mamba", "mamba2", "linear_attention"})


@dataclass(frozen=True)
class Architecture:
    """The layers of a model, the dtype of its recurrent state, and the grid on which a prefill can save one.

    `chunk_tokens` is SGLang's `mamba_cache_chunk_size` at page size 1 (`extra_buffer` strategy), `context_tokens` the
    longest sequence, 0 where the configuration names none.
    """

    layers: tuple[Layer, ...]
    state_dtype: str = "float32"
    chunk_tokens: int = 1
    context_tokens: int = 0


def attention(reader: ConfigReader, output_gate: bool = False) -> Attention:
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    if reader.value("head_dim", "attention_head_dim") is None and hidden % heads:
        raise reader.wrong("num_attention_heads", f"a divisor of hidden_size={hidden} when head_dim is absent", heads)
    return Attention(
        hidden=hidden,
        heads=heads,
        kv_heads=reader.count("num_key_value_heads", default=heads),
        head_dim=reader.count("head_dim", "attention_head_dim", default=hidden // heads),
        output_gate=output_gate,
    )


def mamba2(reader: ConfigReader, inner: int, chunk_key: str = "mamba_chunk_size") -> Mamba2:
    heads = reader.count("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
    if inner % heads:
        raise reader.wrong("number of Mamba heads", f"a divisor of the inner width {inner}", heads)
    return Mamba2(
        hidden=reader.count("hidden_size"),
        heads=heads,
        head_dim=inner // heads,
        groups=reader.count("mamba_n_groups", "mamba_ngroups", "n_groups", default=1),
        state=reader.count("mamba_d_state", "ssm_state_size", "state_size"),
        conv_kernel=reader.count("mamba_d_conv", "conv_kernel", default=4, minimum=2),
        chunk=reader.count(chunk_key, "mamba_chunk_size", "chunk_size", default=256),
    )


def expanded(reader: ConfigReader) -> int:
    return reader.count("mamba_expand", "expand", default=2) * reader.count("hidden_size")


def is_recurrent(reader: ConfigReader, labels: Iterable[str]) -> list[bool]:
    """One flag per layer label; raises ConfigError for a label that is neither attention nor recurrent."""
    flags = []
    for label in labels:
        if label not in ATTENTION_LABELS | RECURRENT_LABELS:
            raise reader.wrong("layer_types", f"made of {sorted(ATTENTION_LABELS | RECURRENT_LABELS)}", label)
        flags.append(label in RECURRENT_LABELS)
    return flags


def layer_labels(reader: ConfigReader) -> list[str] | None:
    """The explicit list of layer kinds, of the stated length, or None if the configuration has none."""
    labels = reader.items("layer_types", "layers_block_type", of=str)
    depth = reader.value("num_hidden_layers")
    if labels is not None and depth is not None and len(labels) != depth:
        raise reader.wrong("num_hidden_layers", f"the length of layer_types, {len(labels)}", depth)
    return labels


def mamba1(reader: ConfigReader, inner: int, rank_key: str) -> Mamba1:
    hidden = reader.count("hidden_size")
    automatic = reader.value(rank_key) in (None, "auto")
    return Mamba1(
        hidden=hidden,
        inner=inner,
        state=reader.count("mamba_d_state", "state_size"),
        dt_rank=-(-hidden // 16) if automatic else reader.count(rank_key),
        conv_kernel=reader.count("mamba_d_conv", "conv_kernel", default=4, minimum=2),
    )


def state_dtype(reader: ConfigReader) -> str:
    """`mamba_ssm_dtype`, float32 if absent: the families for which SGLang's `mamba2_state_dtype` reads the config."""
    return reader.text("mamba_ssm_dtype", default="float32")
