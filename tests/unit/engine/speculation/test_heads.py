"""A head's prefill runs outside a CUDA graph that would drop what the head is fed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.cache.passes import forward
from sglang_hybrid.engine.speculation.heads import loses_input


def a_runner(*, drafts: bool = True, head: bool = True, body: bool = False, place: bool = False) -> Any:
    """SGLang's runner of prefill graphs: for what drafts, with its projection in front of the layers or among them."""
    layers = SimpleNamespace(layers=[], **({"fc": object()} if body else {}))
    model = SimpleNamespace(model=layers, **({"fc": object()} if head else {}))
    return SimpleNamespace(
        model_runner=SimpleNamespace(is_draft_worker=drafts, model=model),
        layer_model=layers,
        buffer_registry=SimpleNamespace(has_slot=lambda name: place and name == "input_embeds"),
    )


def test_a_projection_in_front_of_the_layers_is_lost() -> None:
    assert loses_input(a_runner())
    assert not loses_input(a_runner(drafts=False)), "the target's prefill stays in its graph"
    assert not loses_input(a_runner(head=False, body=True)), "EAGLE's is among the layers, and so in the graph"
    assert not loses_input(a_runner(place=True)), "models of images hand over embeddings"


@pytest.mark.parametrize("votes", [None, [4, 4]])
def test_such_a_head_is_prefilled_outside_a_graph_on_every_rank(votes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_pending", None)
    batch = SimpleNamespace(global_num_tokens_cpu=votes)
    assert forward.outside_a_graph(True, a_runner(), batch) is False
    assert forward.outside_a_graph(True, a_runner(place=True), batch) is None
    assert forward.outside_a_graph(False, a_runner(), batch) is None


@pytest.mark.parametrize("module", ["qwen3_next_mtp", "qwen3_5_mtp"])
def test_sglang_still_projects_in_front_of_the_layers(module: str) -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None
    source = Path(next(iter(found.submodule_search_locations or ())), "srt/models", f"{module}.py").read_text()
    at = [source.index(text) for text in ("self.fc = ", "hidden_states = self.fc(", "hidden_states = self.model(")]
    assert at == sorted(at), "look at what the graph of a prefill holds, and whether the rule is still needed"
