"""What drafts: the flags must name it, the files must hold it, and a CPU must be able to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec, from_config
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import folder as files
from sglang_hybrid.engine.launch.models import Model, read_config
from sglang_hybrid.engine.speculation import algorithms

_HEADS = ("Qwen3Next", "Qwen3_5", "NemotronH")
"""Architectures whose published weights may hold a head that predicts several tokens, in tensors `mtp.*`."""

_ONLY_CUDA = ("Qwen3NextForCausalLM",)
"""Models that wait for CUDA when their head takes over the target's embedding."""


def defaults(namespace: Any) -> dict[str, Any]:
    """Flags to add where SGLang would compare a number with nothing: steps without a width are a chain."""
    if _has_drafts(namespace) and namespace.speculative_num_steps and namespace.speculative_eagle_topk is None:
        return {"speculative_eagle_topk": 1}
    return {}


def check(namespace: Any, model: Model, on_cpu: bool) -> None:
    """Raise ConfigError if what drafts in the final settings `namespace` is not there or cannot be served."""
    if on_cpu and namespace.speculative_algorithm is not None and not compat.complete():
        raise ConfigError(
            f"on a CPU speculation was run with SGLang {' and '.join(compat.COMPLETE)} only; install one of them or "
            f"drop --speculative-algorithm: {compat.engine_version()}"
        )
    algorithms.check(namespace, model, on_cpu)
    if not _has_drafts(namespace):
        return
    given = {
        "--speculative-eagle-topk": namespace.speculative_eagle_topk,
        "--speculative-num-draft-tokens": namespace.speculative_num_draft_tokens,
    }
    alone = [f"{flag} {value}" for flag, value in given.items() if value is not None]
    if namespace.speculative_num_steps is None and alone:
        raise ConfigError(f"the steps of a draft are not said; add --speculative-num-steps: {alone[0]}")
    if namespace.speculative_draft_model_path is None:
        _check_head(namespace, model, on_cpu)
    else:
        _check_draft(namespace, model, on_cpu)


def kv_bytes_per_token(namespace: Any, spec: ModelSpec, dtype: str) -> int:
    """KV that what drafts keeps beside a token of the target `spec`, in `dtype`; 0 where it is not known."""
    if not _has_drafts(namespace):
        return 0
    path = namespace.speculative_draft_model_path
    if path is None:
        return spec.head_kv_bytes_per_token
    try:
        return from_config(Path(path).expanduser(), kv_dtype=dtype).kv_bytes_per_token
    except ConfigError:
        return 0


def kv_planes(namespace: Any, spec: ModelSpec) -> int | None:
    """Rows of KV that what drafts keeps of a token beside those of the target `spec`, a rank's; 0 without a model of
    its own, None where they are not known to be as large as the target's."""
    if not _has_drafts(namespace):
        return 0
    path = namespace.speculative_draft_model_path
    if path in (None, namespace.model_path):  # where its configuration says nothing of a head, SGLang makes one layer
        return sum(layer.kv_rows for layer in spec.head) or max(layer.kv_rows for layer in spec.layers)
    try:
        draft = from_config(Path(path).expanduser(), kv_dtype=spec.kv_dtype, tp=spec.tp)
    except ConfigError:
        return None
    return None if draft.is_recurrent or draft.kv_row_bytes != spec.kv_row_bytes else draft.kv_planes


def _has_drafts(namespace: Any) -> bool:
    return (namespace.speculative_algorithm or "").upper() in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


def _check_head(namespace: Any, model: Model, on_cpu: bool) -> None:
    """The model drafts itself: its architecture has a head, and its weights hold it."""
    if not model.is_recurrent:
        return  # SGLang knows more models than are looked at here
    algorithm, name = namespace.speculative_algorithm, model.architecture
    instead = f"give {algorithms.DRAFT}, or use --speculative-algorithm NGRAM, which needs no model"
    if algorithm.upper() in ("STANDALONE", "EAGLE3") or not name.startswith(_HEADS):
        raise ConfigError(f"nothing is there that drafts for {name}; {instead}: --speculative-algorithm {algorithm}")
    names = files.tensor_names(model.path, namespace.load_format)
    if names is not None and not any("mtp" in tensor for tensor in names):
        raise ConfigError(
            f"the weights hold no head that drafts, no tensor mtp.*, as many fine-tuned models do not; {instead}: "
            f"{model.path}"
        )
    if on_cpu and name in _ONLY_CUDA:
        raise ConfigError(f"the head of this model is served on a GPU only; {instead}: {name}")


def _check_draft(namespace: Any, model: Model, on_cpu: bool) -> None:
    """Another model drafts: its folder is there, its tokens are those of the target, and a CPU can run it."""
    path = namespace.speculative_draft_model_path
    folder = Path(path).expanduser()
    if not folder.exists():
        files.refuse_typo(path)
        if path.startswith((".", "/", "~")):
            raise ConfigError(f"no such model folder: {algorithms.DRAFT} {path}")
        return  # a name of the hub
    config = read_config(folder)
    sizes = [_vocabulary(config), _vocabulary(model.config or {})]
    if namespace.speculative_algorithm.upper() == "STANDALONE" and None not in sizes and sizes[0] != sizes[1]:
        raise ConfigError(
            f"the model that drafts has {sizes[0]:,} tokens and the model that it drafts for {sizes[1]:,}; give one of "
            f"the same tokenizer: {algorithms.DRAFT} {path}"
        )
    if not on_cpu:
        return
    try:
        recurrent = from_config(config).is_recurrent
    except ConfigError:
        return  # of no hybrid architecture
    if recurrent:
        raise ConfigError(
            f"on a CPU a model of attention alone can draft, this one has recurrent layers; give another, or use "
            f"--speculative-algorithm NGRAM: {algorithms.DRAFT} {path}"
        )


def _vocabulary(config: dict[str, Any]) -> int | None:
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return int(size) if size else None
