"""Storage behind the host tier: a server that starts anew serves what an earlier one computed, and nothing wrong."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from sglang_hybrid.engine import compat
from tests.engine.prompts import words
from tests.engine.support import PATIENCE_S, Client, Reference, ask, cached

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::Warning:sglang"),
    pytest.mark.skipif(not compat.complete(), reason="other versions are refused"),
]
FLAGS = (
    "--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-write-policy", "write_through",
    "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete", "--page-size", "64",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model.build(tmp_path_factory.mktemp("model") / "current", "gdn")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Four of their own, and three that fork."""
    rng = random.Random(41)
    shared = words(rng, 600)
    return [words(rng, rng.randint(400, 900)) for _ in range(4)] + [shared + words(rng, 100) for _ in range(3)]


@contextmanager
def server(folder: Path, kept: Path, log: Path, *more: str, **environment: str) -> Iterator[Client]:
    kept.mkdir(exist_ok=True)
    environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(kept)
    started = Server(folder, (*FLAGS, *more), log=log, environment=environment)
    started.wait_ready(PATIENCE_S)
    try:
        yield Client(started)
    finally:
        started.stop()


def stored(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["cached_tokens_details"].get("storage", 0))


def test_a_server_that_starts_anew_serves_what_was_stored_and_damage_is_a_miss(
    folder: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    reference, kept = Reference(folder), tmp_path / "kept"
    with server(folder, kept, tmp_path / "first.log") as client:
        first = [ask(client, prompt) for prompt in prompts]
    for prompt, answer in zip(prompts, first, strict=True):
        reference.assert_greedy(prompt, answer["output_ids"])
    with server(folder, kept, tmp_path / "second.log") as client:
        second = [ask(client, prompt) for prompt in prompts]
        elsewhere = ask(client, prompts[0], extra_key="another tenant")
    assert (cached(elsewhere), stored(elsewhere)) == (0, 0)
    for prompt, one, two in zip(prompts, first, second, strict=True):
        reference.assert_same(prompt, one["output_ids"], two["output_ids"])
        assert cached(two) == len(prompt) // 64 * 64
    assert [stored(answer) for answer in second[:4]] == [len(prompt) // 64 * 64 for prompt in prompts[:4]]
    for file in sorted(kept.glob("*.bin"))[::3]:
        file.write_bytes(file.read_bytes()[:100])
    with server(folder, kept, log := tmp_path / "third.log") as client:
        third = [ask(client, prompt) for prompt in prompts]
        again = [ask(client, prompt) for prompt in prompts]
    for prompt, one, three, four in zip(prompts, first, third, again, strict=True):
        reference.assert_same(prompt, one["output_ids"], three["output_ids"])
        reference.assert_same(prompt, one["output_ids"], four["output_ids"])
        assert cached(four) >= 384, "computed since"
    assert "Short read" in log.read_text()


def test_ranks_that_share_latents_have_states_of_their_own(prompts: list[list[int]], tmp_path: Path) -> None:
    """Before 0.5.23 SGLang has one file for the states of all ranks of Kimi-Linear: each went on from those of one."""
    kimi, answers = model.build(tmp_path / "model", "kda"), []
    for start in ("first", "second"):
        ranks = ("--tp-size", "2")
        with server(
            kimi, tmp_path / "kept", tmp_path / f"{start}.log", *ranks, SGLANG_CPU_OMP_THREADS_BIND="0|1"
        ) as two:
            answers.append([ask(two, prompt) for prompt in prompts[:4]])
    first, second = answers
    assert [answer["output_ids"] for answer in second] == [answer["output_ids"] for answer in first]
    assert [stored(answer) for answer in second] == [len(prompt) // 64 * 64 for prompt in prompts[:4]]


def test_what_other_weights_stored_is_not_served(folder: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """Other weights at the same path, and weights that change while the server runs."""
    kept, old = tmp_path / "kept", tmp_path / "old"
    shutil.copytree(folder, old)
    with server(folder, kept, tmp_path / "first.log") as client:
        ask(client, prompts[0])
    drawn, weights = torch.Generator().manual_seed(7), load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() > 1:
            weights[name] = torch.empty_like(weight).normal_(0, float(weight.float().std()), generator=drawn)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    reference = Reference(folder)
    with server(folder, kept, log := tmp_path / "second.log") as client:
        answer = ask(client, prompts[0])
        assert (cached(answer), stored(answer)) == (0, 0)
        reference.assert_greedy(prompts[0], answer["output_ids"])
        assert client.post("/update_weights_from_disk", {"model_path": str(old)})["success"]
        answer = ask(client, prompts[0])
        assert (cached(answer), stored(answer)) == (0, 0)
        Reference(old).assert_greedy(prompts[0], answer["output_ids"])
    assert "holds what other weights computed" in log.read_text()


def test_turns_of_a_streaming_session_go_on_beside_storage(
    folder: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """SGLang looks for the node of the tree where a session's memory ends: there is none, and the scheduler ends."""
    reference, history = Reference(folder), list[int]()
    with server(folder, tmp_path / "kept", tmp_path / "log", "--enable-streaming-session") as client:
        body = {"capacity_of_str_len": 10_000, "streaming": True}
        session = client.post("/open_session", body).strip('"')
        for prompt in prompts[:3]:
            answer = ask(client, prompt[:150], session_params={"id": session})
            history += prompt[:150]
            reference.assert_greedy(history, answer["output_ids"])
            assert cached(answer) == max(0, len(history) - 151)
            history += answer["output_ids"]
