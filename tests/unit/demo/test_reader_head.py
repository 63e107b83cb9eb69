"""The head that drafts for the reader: its steps, its training, what is published of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.demo import model as demo_model
from sglang_hybrid.demo import train_head
from sglang_hybrid.demo.reader import drafting, tokens, weights
from sglang_hybrid.demo.reader.network import models
from sglang_hybrid.demo.reader.network.head import Head, initialise
from tests.unit.demo.test_speculation import PUBLISHED_HEAD

MODEL = drafting.MODEL


def random_head() -> Head:
    head, generator = Head(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return head


@torch.no_grad()
def test_all_drafts_at_once_are_those_of_a_server() -> None:
    """A server has the trunk's states up to a place in the head's KV, then adds what the head itself made."""
    head, places = random_head(), 9
    states, *embedded = torch.randn(4, 1, places, models.HIDDEN, generator=torch.Generator().manual_seed(2))
    made = head(states, embedded)
    for place in (0, 4, places - 1):
        known, read = states[:, : place + 1], embedded[0][:, : place + 1]
        for step, at_once in enumerate(made):
            (one,) = head(known, [read])
            torch.testing.assert_close(one[:, -1], at_once[:, place], atol=1e-4, rtol=1e-4)
            if step + 1 < len(made):
                known = torch.cat([known, one[:, -1:]], 1)
                read = torch.cat([read, embedded[step + 1][:, place : place + 1]], 1)


def test_the_head_begins_with_the_readers_attention() -> None:
    reader, head = models.READERS[MODEL](tokens.VOCABULARY), Head()
    models.initialise(reader, torch.Generator().manual_seed(1))
    initialise(head, reader)
    q = "self_attn.q_proj.weight"
    assert torch.equal(head.layers[0].state_dict()[q], reader.model.layers[-1].state_dict()[q])


def test_the_same_seed_gives_the_same_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "STEP_TOKENS", 192)
    monkeypatch.setattr(drafting, "LENGTHS", (96,))
    reader = weights.network(MODEL)
    before = {name: weight.clone() for name, weight in reader.state_dict().items()}
    (first, seen), (again, _), (other, _) = (drafting.train(reader, 2, seed, lambda _: None) for seed in (1, 1, 2))
    assert seen == 2 * 192
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert all(torch.equal(weight, before[name]) for name, weight in reader.state_dict().items()), "it is frozen"


@pytest.mark.parametrize(
    ("guesses", "shares", "length"),
    [
        ((True, True, True), (1, 1, 1), 4.0),
        ((True, False, True), (1, 0, 0), 2.0),
        ((False, True, True), (0, 0, 0), 1.0),
    ],
)
def test_what_is_accepted(
    guesses: tuple[bool, ...], shares: tuple[int, ...], length: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer of 13 tokens: the prompt gives the first, so twelve are told by drafts, from nine whole ones on."""

    def drafts(reader: object, head: object, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        said = torch.nn.functional.one_hot(ids.roll(-1, 1), 100).float()
        guessed = [(1 if right else -1) * said[:, 1 + i : ids.shape[1] - 2 + i] for i, right in enumerate(guesses)]
        return said, guessed

    monkeypatch.setattr(drafting, "drafts", drafts)
    ids = list(range(1, 31))
    found = drafting.accepted(models.READERS[MODEL](tokens.VOCABULARY), Head(), [(ids, [(10, 23)])])
    assert found == drafting.Accepted(shares, length, 10)


def test_the_published_head_is_that_of_its_card_and_drafts(tmp_path: Path) -> None:
    file, entry = weights.head(MODEL), weights.card(MODEL)["drafting"]
    assert file is not None
    assert file.stat().st_size < 10**6
    folder = demo_model.build(tmp_path / "built", MODEL)
    beside = load_file(folder / "mtp.safetensors")
    assert set(beside) == PUBLISHED_HEAD
    assert not set(beside) & set(load_file(folder / "model.safetensors"))
    assert json.loads((folder / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    reader, head = weights.network(MODEL), drafting.load(file)
    found = drafting.accepted(reader, head, train_head.held_out(512, 3))
    assert found.shares[0] > 0.5, found
    assert entry["accepted"][0]["shares"][0] > 0.5
    assert f"--steps {entry['steps']} --seed {entry['seed']}" in (weights.FOLDER / f"{MODEL}.md").read_text()


def test_other_weights_get_no_head(tmp_path: Path) -> None:
    given = tmp_path / "given.safetensors"
    given.write_bytes(weights.path(MODEL).read_bytes())
    folder = demo_model.build(tmp_path / "built", MODEL, given)
    assert not (folder / "mtp.safetensors").exists()
    assert "mtp_num_hidden_layers" not in json.loads((folder / "config.json").read_text())
    assert weights.head("reader-mamba2") is None


@pytest.mark.parametrize("damage", ["missing", "cut", "retrained"])
def test_a_bad_head_is_one_line(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = weights.head_path(MODEL).read_bytes()
    for file in weights.FOLDER.glob(f"{MODEL}*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(weights, "FOLDER", tmp_path)
    if damage == "missing":
        weights.head_path(MODEL).unlink()
    elif damage == "cut":
        weights.head_path(MODEL).write_bytes(published[: len(published) // 2])
    else:
        card = weights.card(MODEL)
        other = weights.network(MODEL).state_dict() | {"model.norm.weight": torch.ones(192)}
        weights.write(other, weights.path(MODEL))
        card["sha256"] = weights.digest(weights.path(MODEL))
        (tmp_path / f"{MODEL}.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match=r"head .*head\.safetensors") as error:
        demo_model.build(tmp_path / "built", MODEL)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "built").exists()


def test_a_training_writes_weights_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "STEP_TOKENS", 96)
    monkeypatch.setattr(drafting, "LENGTHS", (96,))
    monkeypatch.setattr(train_head, "LENGTHS", (256,))
    assert train_head.main(["--out", str(tmp_path), "--steps", "1", "--conversations", "1"]) == 0
    entry = json.loads((tmp_path / f"{MODEL}-head.json").read_text())
    file = tmp_path / f"{MODEL}-head.safetensors"
    assert entry["sha256"] == weights.digest(file)
    assert set(load_file(file)) == PUBLISHED_HEAD
    assert [row["text"] for row in entry["accepted"]] == ["256 tokens"]
    with pytest.raises(SystemExit):
        train_head.main(["--out", str(tmp_path), "--steps", "0"])
