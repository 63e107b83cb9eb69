"""The pass of a head behind a composed prefill: what takes its place in SGLang's calls, and what it begins from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.engine.segments import forward, heads


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A composed pass that ran last, over the slots of `batch`."""
    slots = torch.arange(5)
    now = SimpleNamespace(slots=slots, embeds=None, batch=None, composer=None)
    monkeypatch.setattr(forward, "_running", now)
    return SimpleNamespace(now=now, batch=SimpleNamespace(out_cache_loc=slots))


def worker() -> Any:
    return SimpleNamespace(draft_runner=SimpleNamespace(attn_backend=SimpleNamespace(name="own")))


def test_another_backend_takes_the_heads_place_for_the_pass(composed: Any) -> None:
    drafts, own = worker(), []

    def run(worker: Any, batch: Any, hidden: Any, tokens: Any, embeds: Any, **kwargs: Any) -> str:
        own.append(worker.draft_runner.attn_backend)
        assert (hidden, tokens, embeds, kwargs) == ("hidden", "tokens", None, {"plan": 1})
        return "drafted"

    assert heads.draft(run, drafts, composed.batch, "hidden", "tokens", plan=1) == "drafted"
    assert isinstance(own[0], heads.HeadAttention)
    assert own[0].name == "own", "what else SGLang asks is answered by its own"
    assert drafts.draft_runner.attn_backend.name == "own"
    assert not isinstance(drafts.draft_runner.attn_backend, heads.HeadAttention)


def test_a_pass_that_ends_in_an_error_leaves_the_heads_backend(composed: Any) -> None:
    drafts = worker()

    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        heads.draft(run, drafts, composed.batch, None, None)
    assert not isinstance(drafts.draft_runner.attn_backend, heads.HeadAttention)


def test_a_plain_batch_is_sglangs(composed: Any) -> None:
    drafts, embeds = worker(), torch.ones(5, 2)

    def run(worker: Any, batch: Any, hidden: Any, tokens: Any, embeds: Any) -> Any:
        assert not isinstance(worker.draft_runner.attn_backend, heads.HeadAttention)
        return embeds

    other = SimpleNamespace(out_cache_loc=torch.arange(5))
    assert heads.draft(run, drafts, other, None, None, embeds) is embeds
    assert composed.now.embeds is None


def test_beside_images_the_pass_begins_from_the_embeddings_of_the_short_stream(composed: Any) -> None:
    """SGLang would cut them by lengths of its own stream, which is longer."""
    embeds = torch.arange(8.0).view(4, 2)
    heads.draft(lambda *args, **kwargs: None, worker(), composed.batch, None, None, embeds)
    assert composed.now.embeds.tolist() == [[2, 3], [4, 5], [6, 7], [6, 7]]


def test_layers_of_a_head_are_those_of_its_pool() -> None:
    assert heads._layers(SimpleNamespace(full_attention_layer_id_mapping={7: 1, 3: 0})) == [3, 7]
    assert heads._layers(SimpleNamespace(start_layer=None, layer_num=1)) == [0]
    assert heads._layers(SimpleNamespace(start_layer=2, layer_num=2)) == [2, 3]
