"""What SGLang has for other architectures than the served one: stages, groups of attention, embeddings, diffusion."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.launch.flags import attention_groups
from sglang_hybrid.engine.launch.models import Model

_WHOLE = ("Qwen3NextForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
"""Models without pipeline stages, which end the start on an assertion (0.5.17 to 0.5.23)."""

_OVER_ALL_RANKS = ("KimiLinearForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
"""Models whose recurrent layers are cut by tensor parallelism alone, and their states by the groups of data-parallel
attention: the first pass ends on shapes (0.5.21 and 0.5.23)."""

_TIED = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
_WITHOUT_POOLER = (
    "Qwen3NextForCausalLM", "FalconH1ForCausalLM", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM",
)  # fmt: skip


def check(namespace: Any, model: Model) -> None:
    """Raise ConfigError for such settings; `namespace` are SGLang's final ones."""
    _check_stages(namespace, model)
    _check_groups(namespace, model)
    _check_multiplexed(namespace, model)
    _check_diffusion(namespace, model)
    _check_pooling(namespace, model)


def _check_stages(namespace: Any, model: Model) -> None:
    """SGLang does not cut every model into pipeline stages, and of some the answers would be random.

    Of Qwen3.5 as text with tied embeddings the last stage has a head of its own that nothing is loaded into.
    """
    if namespace.pp_size < 2 or model.config is None:
        return
    name = model.architecture
    if name in _WHOLE:
        raise ConfigError(f"SGLang cuts no {name} into pipeline stages; use --tp-size: --pp-size {namespace.pp_size}")
    if name in _TIED and model.config.get("tie_word_embeddings"):
        raise ConfigError(
            f"the last pipeline stage of {name} with tied embeddings has a head without weights in SGLang, and every "
            f"answer is wrong; use --tp-size: --pp-size {namespace.pp_size}"
        )


def _check_groups(namespace: Any, model: Model) -> None:
    """Data-parallel attention of a model whose states would not fit its layers; 0.5.23 has a flag of its own for it."""
    count, given = attention_groups(namespace), "--attn-dp-size"
    if namespace.enable_dp_attention:
        given = "--enable-dp-attention --dp-size"
    weights = getattr(namespace, "dwdp_size", 1) or 1  # implies both
    if weights > 1 or (count > 1 and getattr(namespace, "enable_dp_attention_local_control_broadcast", False)):
        asked = f"--dwdp-size {weights}" if weights > 1 else "--enable-dp-attention-local-control-broadcast"
        raise ConfigError(
            "each group of ranks would get updates of weights and releases of memory in a pass of its own, and the "
            f"server hangs or answers with a part of the new weights; drop: {asked}"
        )
    if count < 2 or model.config is None or model.architecture not in _OVER_ALL_RANKS:
        return
    raise ConfigError(
        f"SGLang has no data-parallel attention for {model.architecture}; use --tp-size without it: {given} {count}"
    )


def _check_multiplexed(namespace: Any, model: Model) -> None:
    """A prefill beside a decode runs a few layers at a time, by a method that no hybrid model has (0.5.17 on)."""
    if getattr(namespace, "enable_pdmux", False) and model.is_recurrent:
        raise ConfigError(
            f"SGLang cannot run the layers of {model.architecture} a few at a time, and its scheduler would end at the "
            "first request; drop: --enable-pdmux"
        )


def _check_diffusion(namespace: Any, model: Model) -> None:
    """The start would end in a traceback: SGLang knows how a few models diffuse, none of them with states."""
    algorithm = getattr(namespace, "dllm_algorithm", None)
    if algorithm is not None and model.is_recurrent:
        raise ConfigError(
            f"{model.architecture} is no diffusion model, it says one token after the other; drop: "
            f"--dllm-algorithm {algorithm}"
        )


def _check_pooling(namespace: Any, model: Model) -> None:
    """The scheduler would end on the first request."""
    if namespace.is_embedding and model.architecture in _WITHOUT_POOLER:
        raise ConfigError(f"SGLang makes no embeddings with this model; drop --is-embedding: {model.architecture}")
