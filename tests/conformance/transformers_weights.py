"""Prints the weights of real transformers modules: run as a script, configurations as JSON on stdin, JSON on stdout.

Models are built on the meta device, so dimensions may be real. An answer has `total` parameters and `active`, the
elements one token is multiplied with: no embedding, no output head, only `top_k` of the routed experts, and blocks that
are shared by several layers once per call. A process of its own, because a CPU torchvision lacks two operators.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch

from sglang_hybrid.engine.cpu import vision

vision.install()

ROUTED = re.compile(r"\.experts\.|block_sparse_moe\.(input|output)_linear")
ADAPTER_NUMBER = re.compile(r"(?<=adapter_list\.)\d+")


def build(config: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.zamba2.modeling_zamba2 import Zamba2PreTrainedModel

    Zamba2PreTrainedModel.get_expanded_tied_weights_keys = lambda *_, **__: {}  # ties need a checkpoint to agree
    fields = dict(config.get("text_config", config))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))


def answer(config: dict[str, Any]) -> dict[str, float]:
    fields = config.get("text_config", config)
    experts = fields.get("num_experts") or fields.get("num_local_experts") or fields.get("n_routed_experts") or 1
    model = build(config)
    active, adapters = 0.0, set()
    for name, weight in model.named_parameters(remove_duplicate=False):
        if "embed" in name or "lm_head" in name:
            continue
        if ADAPTER_NUMBER.search(name):  # a shared block holds the adapters of all its calls, each call uses one
            adapter = ADAPTER_NUMBER.sub("", name)
            if adapter in adapters:
                continue
            adapters.add(adapter)
        active += weight.numel() * (fields["num_experts_per_tok"] / experts if ROUTED.search(name) else 1)
    return {"active": active, "total": sum(weight.numel() for weight in model.parameters())}


if __name__ == "__main__":
    sys.stdout.write(json.dumps([answer(config) for config in json.load(sys.stdin)]) + "\n")
