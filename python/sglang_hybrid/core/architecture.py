"""Parts that several model families share, read from a Hugging Face configuration."""

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_hybrid.core.layers import Attention, LatentAttention, Layer, Mlp, Moe
from sglang_hybrid.core.reading import ConfigReader
from sglang_hybrid.core.recurrent import GatedDeltaNet, Mamba1, Mamba2

ATTENTION_LABELS = frozenset({"attention", "full_attention", "hybrid"})
RECURRENT_LABELS = frozenset({"mamba", "mamba2", "linear_attention"})
MOST_LAYERS = 4096  # no model has more; a damaged file does, and would take all memory


@dataclass(frozen=True)
class Architecture:
    """The layers of a model, the dtype of its recurrent state, and the grid on which a prefill can save one.

    `chunk_tokens` is SGLang's `mamba_cache_chunk_size` at page size 1 (`extra_buffer` strategy), `context_tokens` the
    longest sequence, 0 where the configuration names none. `head` are the layers of a multi-token prediction head,
    which only speculative decoding computes.
    """

    layers: tuple[Layer, ...]
    state_dtype: str = "float32"
    chunk_tokens: int = 1
    context_tokens: int = 0
    head: tuple[Layer, ...] = ()


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


def depth(reader: ConfigReader) -> int:
    """`num_hidden_layers`."""
    return _bounded(reader, "num_hidden_layers", reader.count("num_hidden_layers"))


def head_depth(reader: ConfigReader) -> int:
    """`mtp_num_hidden_layers`, 0 without it."""
    return _bounded(reader, "mtp_num_hidden_layers", reader.count("mtp_num_hidden_layers", default=0, minimum=0))


def _bounded(reader: ConfigReader, key: str, count: int) -> int:
    if count > MOST_LAYERS:
        raise reader.wrong(key, f"at most {MOST_LAYERS}", count)
    return count


def latent_attention(reader: ConfigReader, gate_width: int = 0) -> LatentAttention:
    """Latent attention; `gate_width` is that of an output gate, 0 without one."""
    hidden = reader.count("hidden_size")
    return LatentAttention(
        hidden=hidden,
        heads=reader.count("num_attention_heads"),
        nope_dim=reader.count("qk_nope_head_dim"),
        rope_dim=reader.count("qk_rope_head_dim", minimum=0),
        v_dim=reader.count("v_head_dim"),
        kv_rank=reader.count("kv_lora_rank"),
        q_rank=reader.count("q_lora_rank", default=0, minimum=0),
        extra_weights=hidden * gate_width,
        rotary=not reader.flag("mla_use_nope", default=False),
    )


def experts_after_the_first(reader: ConfigReader, experts_key: str, shared_key: str) -> list[Layer]:
    """A feed-forward per layer: dense in the first `first_k_dense_replace`, then experts beside shared ones.

    Dense everywhere without experts. `routed_expert_hidden_size` is the width that routed experts work on (Kimi K3).
    """
    hidden = reader.count("hidden_size")
    dense: Layer = Mlp(hidden, reader.count("intermediate_size"))
    sparse, experts = dense, reader.count(experts_key, default=0, minimum=0)
    if experts:
        width = reader.count("moe_intermediate_size")
        sparse = Moe(
            hidden,
            width,
            experts,
            reader.count("num_experts_per_token", "num_experts_per_tok"),
            shared_intermediate=width * reader.count(shared_key, default=0, minimum=0),
            latent=reader.count("routed_expert_hidden_size", default=0, minimum=0),
        )
    first = reader.count("first_k_dense_replace", default=0, minimum=0)
    frequency = reader.count("moe_layer_freq", default=1)
    return [sparse if i >= first and i % frequency == 0 else dense for i in range(depth(reader))]


def gated_delta(reader: ConfigReader) -> GatedDeltaNet:
    """Gated DeltaNet by the names of Qwen3-Next."""
    return GatedDeltaNet(
        hidden=reader.count("hidden_size"),
        k_heads=reader.count("linear_num_key_heads"),
        v_heads=reader.count("linear_num_value_heads"),
        k_dim=reader.count("linear_key_head_dim"),
        v_dim=reader.count("linear_value_head_dim"),
        conv_kernel=reader.count("linear_conv_kernel_dim", default=4, minimum=2),
    )


def mamba2(
    reader: ConfigReader, inner: int, chunk_key: str = "mamba_chunk_size", groups_key: str = "mamba_n_groups"
) -> Mamba2:
    heads = reader.count("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
    if inner % heads:
        raise reader.wrong("number of Mamba heads", f"a divisor of the inner width {inner}", heads)
    return Mamba2(
        hidden=reader.count("hidden_size"),
        heads=heads,
        head_dim=inner // heads,
        groups=reader.count(groups_key, "mamba_n_groups", "mamba_ngroups", "n_groups", default=1),
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
