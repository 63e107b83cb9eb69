"""No CUDA graph of a prefill has recurrent layers in it that SGLang would capture by what is freed before a request."""

from __future__ import annotations

import ast
import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.served import ARCHITECTURES
from sglang_hybrid.engine import offline
from sglang_hybrid.engine.cache.passes import captured
from sglang_hybrid.engine.launch import flags, preparation
from sglang_hybrid.engine.processes import embedded
from sglang_hybrid.engine.surface import registration
from tests.engine.configs import LLAMA, QWEN3_NEXT, write

FALCON = {**PUBLISHED["falcon-h1-7b"], "architectures": ["FalconH1ForCausalLM"]}
GRANITE = {**PUBLISHED["granite-4.0-h-small"], "architectures": ["GraniteMoeHybridForCausalLM"]}
BACKEND = "--cuda-graph-backend-prefill"
CONFIG = "--cuda-graph-config"


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")


def complete(folder: Path, *more: str) -> tuple[Any, list[str], list[str]]:
    """What the launcher makes of a command line: SGLang's settings, the arguments added to it, and the notes."""
    rest = ["--model-path", str(folder), *more]
    final, notes = preparation.complete(flags.parse_engine(rest), rest, HybridConfig())
    return flags.parse_engine(final), final[len(rest) :], notes


def test_falcon_h1_starts_without_the_graph_and_says_why(tmp_path: Path, on_a_gpu: None) -> None:
    parsed, added, notes = complete(write(tmp_path, FALCON))
    assert parsed.cuda_graph_backend_prefill == "disabled"
    assert added[added.index(BACKEND) + 1] == "disabled"
    (note,) = (note for note in notes if "CUDA graphs" in note)
    assert f"({BACKEND} disabled)" in note
    assert "FalconH1ForCausalLM" in note


@pytest.mark.parametrize("config", [QWEN3_NEXT, GRANITE, LLAMA])
def test_other_models_keep_sglangs_default(tmp_path: Path, on_a_gpu: None, config: dict[str, Any]) -> None:
    parsed, added, notes = complete(write(tmp_path, config))
    assert parsed.cuda_graph_backend_prefill is None
    assert BACKEND not in added
    assert not any("CUDA graphs" in note for note in notes)


def test_other_models_may_ask_for_a_graph(tmp_path: Path, on_a_gpu: None) -> None:
    assert complete(write(tmp_path, QWEN3_NEXT), BACKEND, "full")[0].cuda_graph_backend_prefill == "full"


def test_a_cpu_has_no_such_graphs_to_speak_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    folder = write(tmp_path, FALCON)
    parsed, added, notes = complete(folder, "--max-running-requests", "1")
    assert parsed.cuda_graph_backend_prefill is None
    assert BACKEND not in added
    assert not any("CUDA graphs" in note for note in notes)
    assert complete(folder, "--max-running-requests", "1", BACKEND, "breakable")[0].cuda_graph_backend_prefill


@pytest.mark.parametrize("given", ["{} disabled", "--disable-prefill-cuda-graph", "--disable-cuda-graph"])
def test_who_turned_it_off_is_told_nothing(tmp_path: Path, on_a_gpu: None, given: str) -> None:
    _, added, notes = complete(write(tmp_path, FALCON), *given.format(BACKEND).split())
    assert BACKEND not in added
    assert not any("CUDA graphs" in note for note in notes)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ((BACKEND, "breakable"), f"{BACKEND} breakable"),
        ((f"{BACKEND}=full",), f"{BACKEND} full"),
        (("--disable-prefill-cuda-graph", BACKEND, "breakable"), f"{BACKEND} breakable"),
        (
            (BACKEND, "disabled", CONFIG, '{"prefill": {"backend": "full", "max_bs": 64}}'),
            f'{CONFIG} \'{{"prefill": {{"backend": "full"}}}}\'',
        ),
    ],
)
def test_who_asks_for_it_is_refused(tmp_path: Path, on_a_gpu: None, given: tuple[str, ...], asked: str) -> None:
    with pytest.raises(ConfigError) as refused:
        complete(write(tmp_path, FALCON), *given)
    assert str(refused.value).endswith(f"; drop it or use {BACKEND} disabled: {asked}")
    assert "FalconH1ForCausalLM" in str(refused.value)


def test_sizes_of_graphs_ask_for_none(tmp_path: Path, on_a_gpu: None) -> None:
    sizes = '{"prefill": {"max_bs": 64}, "decode": {"backend": "breakable"}}'
    parsed, added, _ = complete(write(tmp_path, FALCON), CONFIG, sizes)
    assert parsed.cuda_graph_config["prefill"] == {"max_bs": 64}
    assert parsed.cuda_graph_backend_prefill == "disabled"
    assert BACKEND in added


def test_the_offline_engine_starts_without_it_too(
    tmp_path: Path, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, Any] = {}

    def start(**given: Any) -> Any:
        started.update(given)
        return SimpleNamespace(tokenizer_manager=None)

    monkeypatch.setattr(embedded, "_engines", [])
    monkeypatch.setattr("sglang.srt.entrypoints.engine.Engine", start)
    monkeypatch.setattr(preparation, "enter", lambda *_: None)
    with pytest.warns(UserWarning, match="prefills run without CUDA graphs"):
        offline.Engine(model_path=str(write(tmp_path, FALCON)))
    assert started["cuda_graph_backend_prefill"] == "disabled"


def layer(**parts: str) -> torch.nn.Module:
    """A layer of a model; each of its parts is of an empty class of that name."""
    made = torch.nn.Module()
    for name, kind in parts.items():
        setattr(made, name, type(kind, (torch.nn.Module,), {})())
    return made


def model(*layers: torch.nn.Module) -> Any:
    made = torch.nn.Module()
    made.layers = torch.nn.ModuleList(layers)
    return made


BESIDE = {"attn": "RadixAttention", "mamba": "MambaMixer2"}
ATTENTION = {"attn": "RadixAttention", "mlp": "Qwen2MLP"}
LINEAR = {"linear_attn": "RadixLinearAttention"}


def is_captured(held: Any) -> bool:
    """Whether SGLang would go on to capture a prefill, by its own count of the layers that it knows to leave out."""
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup, layer_setup

    left_out = layer_setup.compute_attention_and_moe_layers(held)
    if not hasattr(cuda_graph_setup, "has_standard_gqa_for_all_local_layers"):
        return len(left_out.attention_layers) >= len(held.layers)  # 0.5.17
    known, _ = cuda_graph_setup.index_attention_layers_by_global_id(
        left_out.attention_layers, left_out.mha_companion_layers, held
    )
    return cuda_graph_setup.has_standard_gqa_for_all_local_layers(
        attention_layer_count=sum(one is not None for one in known), start_layer=0, end_layer=len(held.layers)
    )


def test_sglang_captures_nothing_around_mamba2_beside_attention(caplog: pytest.LogCaptureFixture) -> None:
    """However it was started: SGLang's own function has our hook."""
    with caplog.at_level(logging.WARNING, logger=captured.__name__):
        assert not is_captured(model(layer(**BESIDE), layer(**BESIDE)))
    (record,) = caplog.records
    assert "prefills run without CUDA graphs" in record.message
    assert "sglang.srt.model_executor.model_runner_components.layer_setup.compute_attention_and_moe_layers" in (
        registration._required
    )


def test_sglang_captures_what_it_did_around_other_layers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=captured.__name__):
        assert is_captured(model(layer(**ATTENTION), layer(**LINEAR)))
        assert not is_captured(model(layer(**ATTENTION), layer(mamba="MambaMixer2")))  # as those of Granite
    assert not caplog.records


def test_models_with_mamba2_beside_attention_are_those_of_the_list() -> None:
    """By SGLang's sources: the launcher knows each of them by name."""
    package = importlib.util.find_spec("sglang.srt.models")
    assert package is not None
    assert package.submodule_search_locations
    found = set()
    for file in Path(package.submodule_search_locations[0]).glob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "MambaMixer2" not in text:
            continue
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        if any({"RadixAttention", "MambaMixer2"} <= made_by(node) for node in classes):
            found |= {node.name for node in classes if node.name.endswith("ForCausalLM")}
    assert found == {name for name, row in ARCHITECTURES.items() if row.captured}


def made_by(node: ast.ClassDef) -> set[str]:
    """The classes of what a class's objects are given by name."""
    calls = (each.value for each in ast.walk(node) if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call))
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}
