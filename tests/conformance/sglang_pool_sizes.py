"""Prints what SGLang's own code says about pool sizes: run as a script, cases as JSON on stdin, answers on stdout.

A process of its own, because importing SGLang patches transformers and needs operators a CPU torchvision lacks.
A case is `{"config": {...}, "tp": n}`; an answer has bytes per rank: `conv`, `temporal` and `pool_slot` (one slot of a
really allocated MambaPool, and of what lies beside it, only for small states) of one state, `kv` of one token, an index
included; `chunk`, the checkpoint grid; and
`served`, the configuration as a server has it. Where SGLang has no class for a model, or cannot read its
configuration, the answer is why: `lacks`. Beside the answers, `hybrids` is what SGLang serves.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from importlib.metadata import version
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("SGLANG_USE_CPU_ENGINE", None)  # sizes need no CPU platform

from sglang_hybrid.engine.cpu import vision

vision.install()

ARCHITECTURES = {
    "falcon_h1": "FalconH1ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "llama": "LlamaForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_puzzle": "NemotronHPuzzleForCausalLM",
    "NemotronH_Nano_VL_V2": "NemotronH_Nano_VL_V2",
    "bailing_hybrid": "BailingMoeV2_5ForCausalLM",
    "gigachat3_5": "GigaChat35ForCausalLM",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "intern_s2_preview": "InternS2PreviewForConditionalGeneration",
    "interns2_mobius": "InternS2MobiusForConditionalGeneration",
    "jet_nemotron": "JetNemotronForCausalLM",
    "jet_vlm": "JetVLMForConditionalGeneration",
    "kimi_k3": "KimiK3ForConditionalGeneration",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "minicpm_sala": "MiniCPMSALAForCausalLM",
    "minicpmv4_6": "MiniCPMV4_6ForConditionalGeneration",
    "zaya": "ZayaForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen4_exp": "Qwen4ExpForConditionalGeneration",
}
SMALL_STATE_BYTES = 1 << 20


def read_model(config: dict[str, Any], folder: Path) -> Any:
    """SGLang's ModelConfig of a folder that holds nothing but config.json."""
    from sglang.srt.configs.model_config import ModelConfig

    stored = {"architectures": [ARCHITECTURES[config["model_type"]]], "max_position_embeddings": 4096, **config}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(stored))
    return ModelConfig(model_path=str(folder))


def kv_bytes(model: Any, hybrid: Any, num_layers: int) -> int:
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    source = SimpleNamespace(
        model_config=model,
        mambaish_config=hybrid,
        layer_info=SimpleNamespace(start_layer=0, end_layer=model.num_hidden_layers),
        kv_cache_dtype=model.dtype,
        use_mla_backend=model.attention_arch == AttentionArch.MLA,
        server_args=SimpleNamespace(enable_hisparse=False, enable_dsa_cache_layer_split=False),
        is_draft_worker=False,
    )
    configurator = object.__new__(DefaultPoolConfigurator)  # its __init__ wants a running server
    configurator.kv_cache_dtype_str = "auto"
    if hybrid is None or not (hasattr(hybrid, "index_topk") or hasattr(hybrid, "ple_layer_ids")):
        return int(configurator._compute_cell_size(source, num_layers))
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args():  # what has an index is asked for by the settings of a server
        return int(configurator._compute_cell_size(source, num_layers))


def beside(hybrid: Any, params: Any, slots: int) -> list[Any]:
    """SGLang's pools beside that of the states, [layers, slots + 1, ...] or [slots + 1, ...]; of Qwen4-Exp only."""
    if not getattr(hybrid, "ple_layer_ids", ()):
        return []
    from sglang.srt.mem_cache.ple_state_pool import NGramPool, ShortConvPool

    windows = ShortConvPool(
        size=slots,
        state_shape=hybrid.short_conv_state_shape,
        layer_ids=hybrid.short_conv_layer_ids,
        dtype=params.dtype.conv,
        device="cpu",
    )
    tokens = NGramPool(size=slots, context_len=hybrid.ngram_context_len, eos_token_id=0, device="cpu")
    return [windows.conv_state, tokens.context]


def slot_bytes(hybrid: Any, params: Any) -> int:
    from sglang.srt.mem_cache.memory_pool import MambaPool

    size = 3
    pool = MambaPool(
        size=size, spec_state_size=0, cache_params=params, mamba_layer_ids=list(params.layers), device="cpu"
    )
    held = int(pool.mamba_cache.mem_usage_bytes()) + sum(tensor.nbytes for tensor in beside(hybrid, params, size))
    return held // (size + 1)


def answer(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    from sglang.srt import runtime_context
    from sglang.srt.configs.hybrid_arch import mambaish_config

    tp = case["tp"]
    flags = {} if version("sglang") == "0.5.17" else {"enable_dsa_cache_layer_split": False}
    if hasattr(runtime_context, "linear_attn_parallel_group"):  # since 0.5.23
        flags["enable_cp_tp_group_sharing"] = False
    with runtime_context.get_parallel().override(attn_tp_size=tp, tp_size=tp, attn_dcp_size=1, **flags):
        model = read_model(case["config"], folder)
        hybrid, served = mambaish_config(model), model.hf_config.to_dict()
        if hybrid is None:
            kv = kv_bytes(model, None, model.num_hidden_layers)
            return {"conv": 0, "temporal": 0, "kv": kv, "chunk": None, "served": served}
        params = hybrid.mamba2_cache_params
        layers = len(params.layers)
        result = {
            "conv": sum(prod(shape) for shape in params.shape.conv) * params.dtype.conv.itemsize * layers,
            "temporal": prod(params.shape.temporal) * params.dtype.temporal.itemsize * layers,
            "kv": kv_bytes(model, hybrid, len(hybrid.full_attention_layer_ids)),
            "chunk": getattr(model.hf_config, "mamba_chunk_size", None),
            "served": served,
        }
        if result["conv"] + result["temporal"] != params.mamba_cache_per_req:
            raise AssertionError("the sum of the parts is not SGLang's mamba_cache_per_req")
        result["conv"] += sum(tensor.nbytes for tensor in beside(hybrid, params, 0))
        if params.mamba_cache_per_req <= SMALL_STATE_BYTES:
            result["pool_slot"] = slot_bytes(hybrid, params)
        return result


def hybrids() -> dict[str, Any]:
    """What SGLang serves that is hybrid: `architectures` by its lists, `model_types` of configurations with states.

    `extra_buffer` are those for which it allows that strategy, `served` the names of all classes in its model files.
    """
    from sglang.srt import configs
    from sglang.srt.arg_groups import overrides
    from sglang.srt.configs import linear_attn_model_registry as registry

    named = {name for spec in registry._LINEAR_ATTN_MODEL_REGISTRY for name in spec.arch_names}
    classes = [value for value in vars(configs).values() if hasattr(value, "mamba2_cache_params")]
    models = Path(configs.__file__).parent.with_name("models")
    sources = [file.read_text(encoding="utf-8") for file in models.rglob("*.py")]
    return {
        "architectures": sorted(
            named | overrides._MAMBA_RADIX_CACHE_ARCHS | overrides._MAMBA_EXTRA_BUFFER_ARCHS  # type: ignore[operator]
        ),
        "extra_buffer": sorted(overrides._MAMBA_EXTRA_BUFFER_ARCHS),
        "model_types": {value.__name__: value.model_type for value in classes},
        "served": sorted({name for text in sources for name in re.findall(r"^class (\w+)\(", text, re.MULTILINE)}),
    }


if __name__ == "__main__":
    answers, known = [], hybrids()
    with tempfile.TemporaryDirectory() as root:
        for number, case in enumerate(json.load(sys.stdin)):
            name = ARCHITECTURES[case["config"]["model_type"]]
            if name not in known["served"]:
                answers.append({"lacks": name})
                continue
            try:
                answers.append(answer(case, Path(root) / str(number)))
            except (AttributeError, TypeError, ValueError) as error:
                answers.append({"lacks": f"what it takes to read this {name}: {error}"})
    sys.stdout.write(json.dumps({"answers": answers, "hybrids": known}, default=str) + "\n")
