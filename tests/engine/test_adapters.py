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

from tests.engine.prompts import HEAD, OVERLAP, TREE, words
from tests.engine.support import Client, Reference
from tests.engine.test_sessions import opened

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PRESET, RANK, ALPHA = "reader-gdn", 8, 16
TARGETS = ("o_proj", "gate_proj", "up_proj", "down_proj")
DRAFTS: dict[str, tuple[str, ...]] = {
    "nothing drafts": (),
    "the head drafts": (*HEAD, *TREE, *OVERLAP),
    "n-grams draft": ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"),
}


def adapter(folder: Path, model: Path, seed: int, targets: tuple[str, ...] = TARGETS) -> dict[str, Any]:
    """Write an adapter with random weights that change what is said, in the format of PEFT; returns its tensors."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(next(model.glob("*.safetensors"))).items():
        module = name.removesuffix(".weight")
        if module.endswith(targets) and ("self_attn" in name or "mlp" in name or module == "lm_head"):
            if module.startswith("mtp."):
                continue  # what drafts has no adapters
            outputs, inputs = weight.shape
            size = weight.float().std().item() * 1.5 * (inputs / RANK) ** 0.5 * RANK / ALPHA
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * size
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(targets), "bias": "none"}
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
    assert client.answer("/generate", {"input_ids": prompt, "lora_path": "A"})[0] == 400, "it stays unloaded"
    client.post("/load_lora_adapter", {"lora_name": "A", "lora_path": str(folders["B"])})
    output, cached = client.generate(prompt, lora_path="A")
    judges["B"].assert_greedy(prompt, output)
    assert cached == 0, "what was computed under the name before is another adapter's"


@pytest.mark.parametrize("drafts", DRAFTS)
def test_one_pass_for_several_adapters(
    drafts: str,
    serve: Callable[..., Client],
    models: Callable[[str], Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    """Prompts of all adapters come in one request, so a prefill has several; their output heads differ, too."""
    judges, paths = {None: references("mtp")}, []
    for seed, name in enumerate("AB"):
        tensors = adapter(tmp_path / name, models("mtp"), seed, (*TARGETS, "lm_head"))
        judges[name] = Adapted(models("mtp"), tensors)
        paths.append(f"{name}={tmp_path / name}")
    client = serve("mtp", "--enable-lora", "--lora-paths", *paths, "--mamba-track-interval", "64", *DRAFTS[drafts])
    rng = random.Random(3)
    names = ["A", None, "B", "B", "A", None]
    told = words(rng, 20)
    histories = [told + words(rng, rng.choice([0, 5, 40])) for _ in names]
    verified = said = 0
    sampling = {"temperature": 0, "max_new_tokens": 50, "ignore_eos": True}
    for turn in range(3):
        body = {"input_ids": histories, "lora_path": names, "sampling_params": sampling}
        for i, answer in enumerate(client.post("/generate", body)):
            output, known = answer["output_ids"], answer["meta_info"]
            judges[names[i]].assert_greedy(histories[i], output, f"turn {turn}, adapter {names[i]},")
            assert known["cached_tokens"] <= (len(histories[i]) if turn else 0)
            assert turn < 2 or known["cached_tokens"] >= 64, "the answer before was cached under its adapter"
            said, verified = said + len(output), verified + known.get("spec_verify_ct", 0)
            histories[i] = histories[i] + output + words(rng, 7)
    assert bool(verified) == bool(DRAFTS[drafts])
    assert not verified or said / verified > 1.1


def test_turns_of_a_streaming_session_with_other_adapters(
    serve: Callable[..., Client],
    models: Callable[[str], Path],
    references: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    """SGLang goes on from what the adapter of the turn before computed."""
    judges, paths = {None: references(PRESET)}, []
    for seed, name in enumerate("AB"):
        judges[name] = Adapted(models(PRESET), adapter(tmp_path / name, models(PRESET), seed))
        paths.append(f"{name}={tmp_path / name}")
    client, rng = serve(PRESET, "--enable-lora", "--lora-paths", *paths, "--enable-streaming-session"), random.Random(5)
    session = opened(client, streaming=True)
    history: list[int] = []
    for turn, name in enumerate((None, "A", "A", "B", None)):
        new = words(rng, 150)
        output, cached = client.generate(new, lora_path=name, session_params={"id": session})
        judges[name].assert_greedy(history + new, output, f"turn {turn}, adapter {name},")
        assert cached >= 300 if turn == 2 else cached < 160, "what the same adapter computed is there, and nothing else"
        history += new + output
