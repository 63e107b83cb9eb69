"""What SGLang reads in a model's configuration otherwise than transformers, or not at all: a start that ends, or wrong
answers in silence. By comparison of small models, 0.5.17 to 0.5.23."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.launch import folder as files
from sglang_hybrid.engine.launch.models import Model

_NEMOTRON_GROUPS = 8
"""Of the B and C projections, where config.json says nothing."""

_BY_INTERVAL = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""SGLang builds their layers by `full_attention_interval` alone; transformers writes `layer_types` in its place."""

_INTERVAL = 4
"""Of every published one."""

_UNBOUNDED = (0.0, float("inf"))

_FALCON_BIASES = ("attention_bias", "mlp_bias")


def check(namespace: Any, model: Model) -> None:
    """Raise ConfigError for such a model; `namespace` are SGLang's final settings."""
    if model.config is None:
        return
    if model.architecture in ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"):
        _check_nemotron(namespace, model, model.config)
    if model.architecture == "FalconH1ForCausalLM":
        _check_falcon(model.config)
    if model.architecture in _BY_INTERVAL:
        _check_interval(model.config)
    if model.spec is not None and "mamba2" in model.spec.layer_counts:
        _check_steps(model.config)


def _check_nemotron(namespace: Any, model: Model, config: dict[str, Any]) -> None:
    """SGLang's layers and pools read two names for one number, and a tensor by another name is left out in silence."""
    groups = config.get("n_groups", _NEMOTRON_GROUPS)
    if groups != config.get("mamba_n_groups", _NEMOTRON_GROUPS):
        raise ConfigError(
            f"SGLang reads n_groups of this model as mamba_n_groups too, and the first prompt would end it; add "
            f"--json-model-override-args '{{\"mamba_n_groups\": {groups}}}': n_groups {groups}"
        )
    names = files.tensor_names(model.path, namespace.load_format)
    if names is not None and "backbone.embedding.weight" in names:
        raise ConfigError(
            "SGLang knows the embedding of this model as backbone.embeddings.weight and would answer by a random one; "
            f"rename the tensor backbone.embedding.weight, as transformers 5.12 writes it: {model.path}"
        )


def _check_falcon(config: dict[str, Any]) -> None:
    """SGLang's layer gates before it normalises, leaves out biases of attention and of the MLP, and has those of both
    projections of Mamba-2 or of neither."""
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True):
        raise ConfigError(
            "SGLang's Falcon-H1 gates before it normalises, and answers of a model that was trained the other way are "
            "wrong; it is not served: mamba_rms_norm true, mamba_norm_before_gate true"
        )
    for name in _FALCON_BIASES:
        if config.get(name):
            raise ConfigError(f"SGLang's Falcon-H1 leaves these out and would answer wrongly; not served: {name} true")
    ahead, behind = (bool(config.get(name)) for name in ("mamba_proj_bias", "projectors_bias"))
    if ahead != behind:
        raise ConfigError(
            "SGLang's Falcon-H1 has a bias in both projections of Mamba-2 or in neither, and would answer wrongly; not "
            f"served: mamba_proj_bias {str(ahead).lower()}, projectors_bias {str(behind).lower()}"
        )


def _check_interval(config: dict[str, Any]) -> None:
    """The start ends on an attribute that is not there, or attention is built at other layers than its weights have."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    interval, labels = text.get("full_attention_interval"), text.get("layer_types") or []
    attended = [at for at, label in enumerate(labels, 1) if label == "full_attention"]
    if interval is None:
        add = f'"full_attention_interval": {attended[0] if attended else _INTERVAL}'
        remedy = f"--json-model-override-args '{{{add}}}'" if text is config else f"{add} to text_config in config.json"
        raise ConfigError(
            "SGLang builds the layers of this model by full_attention_interval, and the start would end without it "
            f"(transformers writes layer_types in its place); add {remedy}: full_attention_interval {interval}"
        )
    if labels and attended != [at for at in range(1, len(labels) + 1) if at % interval == 0]:
        raise ConfigError(
            "SGLang builds attention into every layer that full_attention_interval divides, and layer_types of this "
            f"model has it elsewhere; it is not served: full_attention_interval {interval}"
        )


def _check_steps(config: dict[str, Any]) -> None:
    """SGLang's scan bounds no step. transformers writes infinity as an object, other programs as a number."""
    limit = config.get("time_step_limit") or _UNBOUNDED
    bounded = isinstance(limit[1], int | float) and limit[1] != _UNBOUNDED[1]
    if limit[0] or bounded:
        raise ConfigError(
            "SGLang leaves the step sizes of Mamba-2 unbounded, and answers of a model that bounds them are wrong; it "
            f"is not served: time_step_limit {limit}"
        )
