"""Who loads new weights: the model and its own head, but no draft that was loaded from a folder of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.speculation.weights import spare_draft


def updater(served: str, *drafts: str, new: bool = True) -> Any:
    """SGLang's updater where `drafts` are the folders of what drafts; before 0.5.21 unless `new`."""
    runners = [SimpleNamespace(model_config=SimpleNamespace(model_path=path)) for path in (served, *drafts)]
    worker = SimpleNamespace(draft_worker=SimpleNamespace(draft_runners=runners[1:]))
    if new:
        worker.weight_update_runners = lambda: [("draft", runner) for runner in runners[1:]]
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runners[0]), draft_worker=worker)


def loads_draft(updater: Any, selector: str | None = None) -> bool:
    """Whether a call of that selector loads what drafts too, which is there again behind the call."""
    before, message = updater.draft_worker, SimpleNamespace(**({"selector": selector} if selector else {}))
    loaded: bool = spare_draft(lambda updater, _: updater.draft_worker is not None, updater, message)
    assert updater.draft_worker is before
    return loaded


@pytest.mark.parametrize("new", [True, False])
def test_a_draft_keeps_its_weights_and_a_head_does_not(tmp_path: Path, new: bool) -> None:
    model, draft = str(tmp_path / "model"), str(tmp_path / "draft")
    for selector in (None, "all"):
        assert not loads_draft(updater(model, draft, new=new), selector)
        assert loads_draft(updater(model, model, new=new), selector)
        assert loads_draft(updater(model, model + "/", new=new), selector), "the same folder"
        assert loads_draft(updater(model, new=new), selector), "n-grams have no runner"
    assert loads_draft(updater(model, draft, new=new), "draft"), "meant by name"


def test_a_draft_is_there_again_after_a_failure() -> None:
    there = updater("model", "draft")
    before = there.draft_worker

    def original(*_: Any) -> None:
        raise KeyError("a.weight")

    with pytest.raises(KeyError):
        spare_draft(original, there, SimpleNamespace())
    assert there.draft_worker is before


def test_nothing_drafts() -> None:
    alone = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model_config=SimpleNamespace(model_path="model"))),
        draft_worker=None,
    )
    assert spare_draft(lambda *_: "done", alone, SimpleNamespace()) == "done"
