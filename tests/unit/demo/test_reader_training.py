"""A training goes on where it stopped, and nothing half-written is ever read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.demo import evaluate, train
from sglang_hybrid.demo import model as demo_model
from sglang_hybrid.demo.reader import checkpoint, evaluation, training, weights
from sglang_hybrid.demo.reader.curriculum import Curriculum, Stage
from sglang_hybrid.demo.reader.training import Plan, Training

SHORT = Curriculum((Stage(1.01, ((96, 1.0),), (0.3, 0.4), (0.0, 0.1), 192),), cool_down=0.3)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CURRICULA", (SHORT,))


def a_training(folder: Path) -> Training:
    return Training(Plan("reader-gdn", steps=4, seed=5), folder)


def test_a_resumed_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = a_training(tmp_path)
    losses = [whole.train_step() for _ in range(4)]
    first = a_training(tmp_path)
    assert [first.train_step() for _ in range(2)] == losses[:2]
    first.save()
    second = a_training(tmp_path)
    second.resume()
    assert [second.train_step() for _ in range(2)] == losses[2:]
    for name, weight in whole.network.state_dict().items():
        assert torch.equal(weight, second.network.state_dict()[name]), name


def test_a_training_that_begins_with_published_weights_goes_on_from_them(tmp_path: Path) -> None:
    card = weights.card("reader-gdn")
    used = [each["seed"] for each in card["trainings"]]
    plan = Plan("reader-gdn", steps=10, seed=max(used) + 1)
    begun = Training(plan, tmp_path)
    begun.begin_with_published()
    assert (begun.passed.step, begun.passed.tokens) == (0, card["tokens"])
    published = weights.network("reader-gdn").state_dict()
    for name, weight in begun.network.state_dict().items():
        assert torch.equal(weight, published[name]), name
    begun.train_step()
    begun.save()
    after = Training(plan, tmp_path)
    after.resume()
    assert after.passed == begun.passed
    assert after.passed.before == card["trainings"]
    for seed in used:
        with pytest.raises(ConfigError, match="give another --seed"):
            Training(Plan("reader-gdn", steps=10, seed=seed), tmp_path).begin_with_published()


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, {"step": 1})

    def full(content: object, sink: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ConfigError, match="make room, then go on with --resume"):
        checkpoint.save(tmp_path, {"step": 2})
    assert checkpoint.load(tmp_path) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == [checkpoint.NAME]


@pytest.mark.parametrize("content", [None, b"", b"half a file"])
def test_a_bad_checkpoint_is_one_line(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / checkpoint.NAME).write_bytes(content)
    with pytest.raises(SystemExit):
        train.main(["--model", "reader-gdn", "--out", str(tmp_path), "--resume", "--steps", "1"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(tmp_path) in said


@pytest.mark.parametrize("damage", ["missing", "cut", "others"])
def test_bad_weights_are_one_line(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = weights.path("reader-gdn").read_bytes()
    monkeypatch.setattr(weights, "FOLDER", tmp_path)
    (tmp_path / "reader-gdn.json").write_text(f'{{"sha256": "{"0" * 64}"}}')
    given = None
    if damage == "cut":
        weights.path("reader-gdn").write_bytes(published[: len(published) // 2])
    elif damage == "others":
        given = tmp_path / "given.safetensors"
        weights.write({"a": torch.zeros(2)}, given)
    with pytest.raises(ConfigError, match=r"train reader-gdn anew .*safetensors") as error:
        demo_model.build(tmp_path / "built", "reader-gdn", given)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "built").exists()


@pytest.mark.parametrize("model", demo_model.READERS)
def test_published_weights_are_those_of_their_card(model: str, tmp_path: Path) -> None:
    if not (weights.FOLDER / f"{model}.json").exists():
        pytest.fail(f"{model} has no card")
    built = demo_model.build(tmp_path / "built", model)
    assert weights.digest(weights.path(model)) == weights.card(model)["sha256"]
    published, served = load_file(weights.path(model)), load_file(built / "model.safetensors")
    assert published.keys() <= served.keys()
    assert all(torch.equal(published[name], served[name]) for name in published)
    head = {"reader-gdn": set(), "reader-mamba2": {"lm_head.weight"}}[model]
    assert served.keys() - published.keys() == head
    assert all(torch.equal(served[name], published["model.embed_tokens.weight"]) for name in head)
    assert (built / "tokenizer.json").is_file()
    assert sum(weights.path(name).stat().st_size for name in demo_model.READERS) < 12 * 2**20


def test_what_is_published_of_a_further_training_lies_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("reader-gdn.json", "reader-gdn.safetensors"):
        (tmp_path / name).write_bytes((weights.FOLDER / name).read_bytes())
    monkeypatch.setattr(weights, "FOLDER", tmp_path)
    monkeypatch.setattr(evaluation, "drawn", lambda *_: [])
    began, trainings = weights.network("reader-gdn").state_dict(), weights.card("reader-gdn")["trainings"]
    (runs := tmp_path / "runs").mkdir()
    begun = Training(Plan("reader-gdn", steps=4, seed=max(each["seed"] for each in trainings) + 1), runs)
    begun.begin_with_published()
    begun.train_step()
    begun.save()
    evaluate.main(["--model", "reader-gdn", "--checkpoint", str(runs), "--publish"])
    published = weights.network("reader-gdn").state_dict()
    for name, end in begun.network.state_dict().items():
        assert torch.equal(published[name], ((began[name] + end) / 2).bfloat16().float()), name
    *before, last = weights.card("reader-gdn")["trainings"]
    assert before == trainings
    assert last["halfway"]
    assert "half way to its end" in (tmp_path / "reader-gdn.md").read_text()
    with pytest.raises(SystemExit):  # what it began with is gone now
        evaluate.main(["--model", "reader-gdn", "--checkpoint", str(runs), "--publish"])
    assert "not published any more" in capsys.readouterr().err
