"""What a model costs to cache and to compute: bytes per token, bytes per checkpoint, prefill FLOPs.

Every decision of this package (what to checkpoint, what to evict, how to split memory) is priced with a `ModelSpec`.
`preset(name)` and `from_config(...)` build one; byte sizes equal SGLang's own pools (tests/conformance), FLOPs follow
Marconi, appendix A, corrected layer by layer (`core/layers.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.families import read_architecture
from sglang_hybrid.core.layers import Layer
from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.quantized import asked_kv_dtype
from sglang_hybrid.core.reading import load_mapping
from sglang_hybrid.core.sparse import SparseLatentAttention

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
)
MAMBA_FULL_MEMORY_RATIO = 0.9  # SGLang's default of --mamba-full-memory-ratio: state bytes per KV byte


@dataclass(frozen=True)
class Capacity:
    """How much of a byte budget holds what: `tokens` of KV and `states` slots; the rest is unused."""

    tokens: int
    states: int
    used_bytes: int


@dataclass(frozen=True)
class ModelSpec:
    """The cost of one model, or of one tensor-parallel rank of it.

    `prefill_flops(end, start) = flops_per_token*(end - start) + flops_per_token_pair*(end**2 - start**2)`.
    `checkpoint_bytes` is one saved recurrent state of all layers, convolution windows (`conv_bytes`) included, 0 for a
    pure attention model. `chunk_tokens` is the grid on which a prefill can save a state. `layers` is empty when only
    the sums are known. `context_tokens` is the longest sequence it takes, 0 where that is unknown. `head` are the
    layers of its multi-token prediction head, as far as its configuration names one; no other cost counts them.
    """

    name: str
    kv_bytes_per_token: int
    checkpoint_bytes: int
    flops_per_token: float
    flops_per_token_pair: float
    conv_bytes: int = 0
    chunk_tokens: int = 1
    kv_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    conv_dtype: str = "bfloat16"
    tp: int = 1
    layers: tuple[Layer, ...] = ()
    context_tokens: int = 0
    head: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        costs = (self.kv_bytes_per_token, self.checkpoint_bytes, self.flops_per_token, self.flops_per_token_pair)
        if min(costs) < 0 or self.conv_bytes < 0 or self.conv_bytes > self.checkpoint_bytes:
            raise ConfigError(f"costs must not be negative, and windows are part of a checkpoint: {self}")
        if self.chunk_tokens < 1 or self.tp < 1:
            raise ConfigError(f"chunk_tokens and tp must be at least 1: {self.chunk_tokens}, {self.tp}")
        if self.context_tokens < 0:
            raise ConfigError(f"a context holds tokens, 0 stands for unknown: {self.context_tokens}")

    @property
    def temporal_bytes(self) -> int:
        """Bytes of the recurrent states in a checkpoint, without the convolution windows."""
        return self.checkpoint_bytes - self.conv_bytes

    @property
    def is_recurrent(self) -> bool:
        """Whether a prefix needs a saved state to be reused."""
        return self.checkpoint_bytes > 0

    @property
    def checkpoint_tokens(self) -> float:
        """How many tokens of KV one checkpoint is worth in bytes; infinite without KV."""
        return self.checkpoint_bytes / self.kv_bytes_per_token if self.kv_bytes_per_token else float("inf")

    @property
    def head_kv_bytes_per_token(self) -> int:
        """KV bytes of the multi-token prediction head, which a server that drafts with it keeps beside the model's."""
        return _kv_bytes(self.head, self.tp, self.kv_dtype)

    @property
    def kv_planes(self) -> int:
        """Rows in which KV of one token is stored: two of an attention layer, one of a latent one."""
        return sum(layer.kv_rows for layer in self.layers)

    @property
    def kv_row_bytes(self) -> int:
        """KV bytes of one token in one of its rows, which are equal; not of what has an index beside KV."""
        return self.kv_bytes_per_token // self.kv_planes

    @property
    def is_beside(self) -> bool:
        """Whether something is kept beside KV or beside the states: an index of keys, or states of n-grams."""
        return any(layer.index_bytes or layer.kind == "ngram" for layer in self.layers)

    @property
    def layer_counts(self) -> dict[str, int]:
        """Number of layers by kind (`core.layers.KINDS`); mixers and feed-forwards count separately."""
        return dict(Counter(layer.kind for layer in self.layers))

    @property
    def active_weights(self) -> int:
        """Matrix elements one token is multiplied with in the whole model, embeddings and output head excluded."""
        return sum(layer.weights for layer in self.layers)

    @overload
    def prefill_flops(self, end: int, start: int = 0) -> float: ...

    @overload
    def prefill_flops(
        self, end: npt.NDArray[np.int64], start: npt.NDArray[np.int64] | int = 0
    ) -> npt.NDArray[np.float64]: ...

    def prefill_flops(self, end: Any, start: Any = 0) -> Any:
        """FLOPs to prefill tokens [start, end) when [0, start) is cached; one value, or an array of shape [n]."""
        return self.flops_per_token * (end - start) + self.flops_per_token_pair * (end * end - start * start)

    def bytes_for(self, tokens: int, states: int) -> int:
        """Bytes of `tokens` tokens of KV and `states` recurrent states."""
        return tokens * self.kv_bytes_per_token + states * self.checkpoint_bytes

    def fit(self, budget_bytes: int, states: int | None = None, ratio: float = MAMBA_FULL_MEMORY_RATIO) -> Capacity:
        """How many tokens and states fit into `budget_bytes`.

        With `states` given that many come first and KV gets the rest; otherwise the split is SGLang's static one,
        `ratio` bytes of states per byte of KV. Raises ConfigError if the states alone exceed the budget.
        """
        if states is None:
            share = ratio / (1.0 + ratio) if self.kv_bytes_per_token else 1.0
            states = int(budget_bytes * share) // self.checkpoint_bytes if self.is_recurrent else 0
        left_bytes = budget_bytes - states * self.checkpoint_bytes
        if left_bytes < 0:
            raise ConfigError(f"{states} states of {self.checkpoint_bytes} bytes need a larger budget: {budget_bytes}")
        tokens = left_bytes // self.kv_bytes_per_token if self.kv_bytes_per_token else 0
        return Capacity(tokens, states, self.bytes_for(tokens, states))

    def per_rank(self, tp: int) -> "ModelSpec":
        """The cost of one of `tp` tensor-parallel ranks; FLOPs divide evenly, KV heads fewer than `tp` are replicated.

        Raises ConfigError if the layers are unknown or the heads do not divide.
        """
        if tp < 1:
            raise ConfigError(f"tensor parallel size must be at least 1: {tp}")
        return self._priced(tp=tp)

    def with_dtypes(
        self, *, kv_dtype: str | None = None, state_dtype: str | None = None, conv_dtype: str | None = None
    ) -> "ModelSpec":
        """The same model with other storage dtypes (`DTYPE_BYTES`); None keeps the present one."""
        return self._priced(
            kv_dtype=kv_dtype or self.kv_dtype,
            state_dtype=state_dtype or self.state_dtype,
            conv_dtype=conv_dtype or self.conv_dtype,
        )

    def with_pooled_index(self) -> "ModelSpec":
        """The same model where an index beside latent KV has one key for the tokens that share it."""
        pooled = (x.with_pooled_index() if isinstance(x, SparseLatentAttention) else x for x in self.layers)
        return self._priced(layers=tuple(pooled))

    def _priced(self, **changes: Any) -> "ModelSpec":
        if not self.layers:
            raise ConfigError(f"only the total costs of this model are known, build it with from_config: {self.name}")
        return _price(replace(self, **changes))


def _price(spec: ModelSpec) -> ModelSpec:
    """Fill in the sums that follow from layers, dtypes and tensor parallel size."""
    layers, tp = spec.layers, spec.tp
    conv_bytes = sum(layer.conv_elements(tp) for layer in layers) * _dtype_bytes(spec.conv_dtype)
    conv_bytes += sum(layer.token_bytes for layer in layers)
    temporal_bytes = sum(layer.temporal_elements(tp) for layer in layers) * _dtype_bytes(spec.state_dtype)
    return replace(
        spec,
        kv_bytes_per_token=_kv_bytes(layers, tp, spec.kv_dtype),
        checkpoint_bytes=temporal_bytes + conv_bytes,
        conv_bytes=conv_bytes,
        flops_per_token=sum(layer.linear_flops for layer in layers) / tp,
        flops_per_token_pair=sum(layer.pair_flops for layer in layers) / tp,
    )


def _kv_bytes(layers: Sequence[Layer], tp: int, dtype: str) -> int:
    """Bytes of one token's KV on one rank, the index beside it included."""
    elements = sum(layer.kv_elements(tp) for layer in layers)
    return elements * _dtype_bytes(dtype) + sum(layer.index_bytes for layer in layers)


def _dtype_bytes(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"unknown dtype, choose one of {', '.join(DTYPE_BYTES)}: {dtype!r}")
    return DTYPE_BYTES[dtype]


def from_config(
    source: Mapping[str, Any] | str | Path,
    *,
    name: str | None = None,
    kv_dtype: str | None = None,
    state_dtype: str | None = None,
    conv_dtype: str | None = None,
    tp: int = 1,
) -> ModelSpec:
    """The spec of a model from its Hugging Face configuration: a mapping, a config.json or a model folder.

    Dtypes default to what SGLang takes: KV in the model's dtype (float32 models are served in float16 unless told
    otherwise) or what a quantized checkpoint asks for, states in `mamba_ssm_dtype` or float32, convolution windows in
    bfloat16. Raises ConfigError naming the key or the architecture that is wrong, missing or unsupported.
    """
    config = load_mapping(source)
    architecture = read_architecture(config)
    stored = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    unpriced = ModelSpec(
        name=name or _name_of(source, config),
        kv_bytes_per_token=0,
        checkpoint_bytes=0,
        flops_per_token=0.0,
        flops_per_token_pair=0.0,
        chunk_tokens=architecture.chunk_tokens,
        kv_dtype=kv_dtype
        or asked_kv_dtype(config, source)
        or ("float16" if stored == "float32" else str(stored).removeprefix("torch.")),
        state_dtype=state_dtype or architecture.state_dtype,
        conv_dtype=conv_dtype or "bfloat16",
        layers=architecture.layers,
        context_tokens=architecture.context_tokens,
        head=architecture.head,
    )
    return unpriced.per_rank(tp)


def _name_of(source: Mapping[str, Any] | str | Path, config: Mapping[str, Any]) -> str:
    if isinstance(source, Mapping):
        return str(config.get("_name_or_path") or config["model_type"])
    path = Path(source)
    return path.parent.name if path.name == "config.json" else path.name


def engine_dtypes(environ: Mapping[str, str]) -> dict[str, str]:
    """Keyword arguments of `with_dtypes` for SGLang's SGLANG_MAMBA_SSM_DTYPE and SGLANG_MAMBA_CONV_DTYPE.

    SGLang ignores unknown values with a warning; so does this function, without one.
    """
    names = {"state_dtype": "SGLANG_MAMBA_SSM_DTYPE", "conv_dtype": "SGLANG_MAMBA_CONV_DTYPE"}
    known = ("float32", "bfloat16", "float16")
    return {key: environ[variable] for key, variable in names.items() if environ.get(variable) in known}


def describe(spec: ModelSpec) -> list[tuple[str, str]]:
    """Label and value of every line of a human-readable block about `spec`."""
    context = f"{spec.context_tokens:,} tokens" if spec.context_tokens else "not known"
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(spec.layer_counts.items())) or "not known"
    rows = [("model", spec.name), ("layers", counts), ("context", context)]
    if spec.tp > 1:
        rows.append(("costs are for", f"one of {spec.tp} tensor-parallel ranks"))
    rows.append(("KV per token", f"{spec.kv_bytes_per_token:,} bytes ({spec.kv_dtype})"))
    if spec.head:
        rows.append(
            ("KV of its MTP head", f"{spec.head_kv_bytes_per_token:,} bytes per token more, where NEXTN drafts")
        )
    if spec.is_recurrent:
        dtypes = f"{spec.state_dtype} states, {spec.conv_dtype} windows"
        parts = f"{spec.temporal_bytes:,} recurrent + {spec.conv_bytes:,} convolution"
        rows.append(("state", f"{spec.checkpoint_bytes:,} bytes = {parts} ({dtypes})"))
        if spec.kv_bytes_per_token:
            rows.append(("one state weighs", f"as much as {spec.checkpoint_tokens:,.1f} tokens of KV"))
        rows.append(("checkpoint grid", f"{spec.chunk_tokens} tokens"))
    else:
        rows.append(("state", "none: no recurrent layers, every prefix of cached KV can be reused"))
    rows.append(("prefill", f"{spec.flops_per_token / 1e9:,.2f} GFLOP per token"))
    for length in (1024, 32768):
        rows.append((f"prefill of {length:,}", f"{spec.prefill_flops(length) / 1e12:,.2f} TFLOP"))
    return rows


def marconi_hybrid(name: str, attention: int, ssm: int, n: int = 128) -> ModelSpec:
    """The 7B hybrid of the Marconi paper (section 5.1, appendix A), fp16: attention, SSM and 28 MLP layers.

    Its own formulas on purpose, so that results compare with the published ones: D = 4096, no GQA, no causal half, a
    state of D*N and a window of 4 x (2D + 2N). The element-wise term is `10LD` as in the artifact; table 1 prints
    `10L`.
    """
    d, mlp = 4096, 28
    conv_bytes = ssm * (2 * d + 2 * n) * 4 * 2
    return ModelSpec(
        name=name,
        kv_bytes_per_token=attention * 2 * d * 2,
        checkpoint_bytes=ssm * d * n * 2 + conv_bytes,
        flops_per_token=attention * 8.0 * d * d + mlp * 16.0 * d * d + ssm * (12.0 * d * d + 16.0 * d * n + 10.0 * d),
        flops_per_token_pair=attention * 4.0 * d,
        conv_bytes=conv_bytes,
        kv_dtype="float16",
        state_dtype="float16",
        conv_dtype="float16",
        context_tokens=32_768,  # where the traces of the paper end
    )


PRESETS: Mapping[str, ModelSpec] = MappingProxyType(
    {"marconi-7b": marconi_hybrid("marconi-7b", 4, 24)}
    | {name: from_config(config, name=name) for name, config in PUBLISHED.items()}
)


def preset(name: str) -> ModelSpec:
    """The spec of a known model; raises ConfigError for an unknown name."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(f"unknown model preset, choose one of {', '.join(sorted(PRESETS))}: {name!r}") from None
