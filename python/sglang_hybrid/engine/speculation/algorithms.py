"""Which of SGLang's algorithms a hybrid model can be served with, and what EAGLE-3 needs of target and draft.

SGLang checks little of it before the model is loaded: most ends the start with a traceback, UNO answers wrongly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch.models import Model, read_config

_ON_GPU = ("DFLASH", "DSPARK", "UNO")

_HEAD_PER_STEP = ("GigaChat35",)
"""Hybrid architectures with a head for each step, which SGLang runs with `--enable-multi-layer-eagle` by itself."""

_HANDED_OUT = {
    "Qwen3Next": "0.5.17",
    "Glm5Next": "0.5.21",
    "Qwen3_5": "0.5.22",
    "InternS2": "0.5.22",
    "Qwen4Exp": "0.5.22",
}
"""Hybrid architectures whose hidden states SGLang hands to an EAGLE-3 draft, and since when.

Older versions have a method for the multimodal ones that marks no layer.
"""

DRAFT = "--speculative-draft-model-path"


def check(namespace: Any, model: Model, on_cpu: bool) -> None:
    """Raise ConfigError for an algorithm in the settings `namespace` that does not serve `model` here."""
    algorithm = (namespace.speculative_algorithm or "").upper()
    _check_decoupled(namespace)
    if algorithm == "NONE":
        raise ConfigError(f"SGLang ends on this name; drop the flag: --speculative-algorithm {algorithm}")
    if on_cpu and algorithm in _ON_GPU:
        raise ConfigError(
            "SGLang serves this algorithm on a GPU only; use NEXTN, STANDALONE or NGRAM: "
            f"--speculative-algorithm {namespace.speculative_algorithm}"
        )
    if not model.is_recurrent:
        return
    if on_cpu and algorithm and model.spec is not None and "conv" in model.spec.layer_counts:
        raise ConfigError(
            f"drafts of {model.architecture} are verified on a GPU only, by SGLang's convolution; drop it: "
            f"--speculative-algorithm {namespace.speculative_algorithm}"
        )
    if algorithm == "UNO":
        # Its target moves on by a token in the pass that drafts and by a run in the one that verifies; neither, or in
        # trees the second alone, reaches the recurrent states (0.5.21 and 0.5.23).
        raise ConfigError(
            "UNO does not commit recurrent states in SGLang, and answers would be wrong; use NEXTN or NGRAM: "
            f"--speculative-algorithm {namespace.speculative_algorithm}"
        )
    if algorithm == "FROZEN_KV_MTP":
        raise ConfigError(
            f"SGLang drafts so for Gemma 4 only, not for {model.architecture}; use NEXTN for a head of its own: "
            f"--speculative-algorithm {namespace.speculative_algorithm}"
        )
    if algorithm in ("EAGLE", "EAGLE3", "NEXTN") and namespace.enable_multi_layer_eagle:
        _check_head_per_step(model)
    if algorithm == "EAGLE3" and namespace.speculative_draft_model_path is not None:
        _check_target(namespace, model)
        _check_draft(namespace, model)


def _check_decoupled(namespace: Any) -> None:
    """The flags are there, and nothing in SGLang reads them but to ask for addresses (0.5.17 to 0.5.23)."""
    role = getattr(namespace, "decoupled_spec_role", "null")
    if role != "null":
        raise ConfigError(
            f"this SGLang has no decoupled speculation behind its flags; drop: --decoupled-spec-role {role}"
        )


def _check_head_per_step(model: Model) -> None:
    if not model.architecture.startswith(_HEAD_PER_STEP):
        raise ConfigError(
            f"{model.architecture} has one head for all steps, and SGLang ends the start; drop: "
            "--enable-multi-layer-eagle"
        )


def _check_target(namespace: Any, model: Model) -> None:
    """An EAGLE-3 draft reads hidden states of some of the target's layers: SGLang's model has to hand them out."""
    since = next((since for name, since in _HANDED_OUT.items() if model.architecture.startswith(name)), None)
    instead = "use --speculative-algorithm NEXTN or NGRAM"
    if since is None:
        raise ConfigError(
            f"SGLang hands no hidden states of {model.architecture} to a draft; {instead}: "
            f"--speculative-algorithm {namespace.speculative_algorithm}"
        )
    if not compat.at_least(since):
        raise ConfigError(
            f"SGLang hands hidden states of {model.architecture} to a draft from {since} on; upgrade it, or "
            f"{instead}: {compat.engine_version()}"
        )


def _check_draft(namespace: Any, model: Model) -> None:
    """The draft is one of EAGLE-3, and reads as many layers of as many numbers as the target has."""
    path = namespace.speculative_draft_model_path
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return  # a name of the hub, or a folder that others miss
    config, target = read_config(folder), _text(model.config or {})
    name = str(config["architectures"][0])
    if "eagle" not in name.lower():
        raise ConfigError(
            f"this model is no draft of EAGLE-3 but a {name}; use STANDALONE, or give another: {DRAFT} {path}"
        )
    width, wanted = config.get("target_hidden_size") or config.get("hidden_size"), target.get("hidden_size")
    if None not in (width, wanted) and width != wanted:
        raise ConfigError(
            f"the draft reads hidden states of {width:,} numbers and those of {model.architecture} have {wanted:,}; "
            f"give the draft of this model: {DRAFT} {path}"
        )
    layers = target.get("num_hidden_layers")
    read = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if read and layers and not 0 <= min(read) <= max(read) < layers - 1:
        raise ConfigError(
            f"the draft reads hidden states behind layers {', '.join(map(str, read))}, and the last of this model that "
            f"hands them out is {layers - 2}; give the draft of this model: {DRAFT} {path}"
        )


def _text(config: dict[str, Any]) -> dict[str, Any]:
    return config | (config.get("text_config") or {})
