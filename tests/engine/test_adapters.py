"""LoRA adapters: one prompt under several never shares what is cached, whatever is loaded under a name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.prompts import words
from tests.engine.support import Client, Reference

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PRESET, RANK, ALPHA = "reader-gdn", 8, 16
TARGETS = ("o_proj", "gate_proj", "up_proj", "down_proj")


def adapter(folder: Path, model: Path, seed: int) -> dict[str, Any]:
    """Write an adapter with random weights that change what is said, in the format of PEFT; returns its tensors."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(next(model.glob("*.safetensors"))).items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS) and ("self_attn" in name or "mlp" in name):
            outputs, inputs = weight.shape
            size = weight.float().std().item() * 1.5 * (inputs / RANK) ** 0.5 * RANK / ALPHA
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * size
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return tensors


class Adapted(Reference):
    """The model with an adapter added to its weights."""

    def __init__(self, folder: Path, tensors: dict[str, Any]) -> None:
        super().__init__(folder)
        modules = dict(self.model.named_modules())
        for name, low in tensors.items():
            if name.endswith("lora_A.weight"):
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                with torch.no_grad():
                    modules[module].weight += ALPHA / RANK * (tensors[name.replace("lora_A", "lora_B")] @ low)


def test_adapters_share_nothing(
    serve: Callable[..., Client],
    models: Callable[[str], Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    folders = {name: tmp_path / name for name in "AB"}
    judges = {
        name: Adapted(models(PRESET), adapter(folder, models(PRESET), seed))
        for seed, (name, folder) in enumerate(folders.items())
    }
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    client = serve(PRESET, "--enable-lora", "--lora-paths", *paths, "--chunked-prefill-size", "128")
    prompt, outputs = words(random.Random(1), 700), []
    for round_ in range(2):
        for name in (None, "A", "B"):
            output, cached = client.generate(prompt, lora_path=name)
            (references(PRESET) if name is None else judges[name]).assert_greedy(prompt, output)
            assert cached == (640 if round_ else 0)
            outputs.append(output)
    assert len({tuple(output) for output in outputs}) == 3, "the adapters say something else"
    client.post("/unload_lora_adapter", {"lora_name": "A"})
    client.post("/load_lora_adapter", {"lora_name": "A", "lora_path": str(folders["B"])})
    output, cached = client.generate(prompt, lora_path="A")
    judges["B"].assert_greedy(prompt, output)
    assert cached == 0, "what was computed under the name before is another adapter's"
