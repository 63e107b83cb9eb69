"""Servers that compute cold segments for each other: answers are those of composed prefill, whoever computed what."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core.process import free_port
from sglang_hybrid.demo.server import Server
from sglang_hybrid.engine import compat
from tests.engine.composition import Composition
from tests.engine.support import PATIENCE_S, Client, Prompt
from tests.engine.test_segments import ELASTIC, NO_BUFFER, ON, Asker, said

pytestmark = pytest.mark.skipif(not compat.complete(), reason="segments are refused before the start with this SGLang")

CONFIGURATIONS = [
    pytest.param("reader-gdn", (), id="gdn"),
    pytest.param("reader-gdn", ELASTIC, id="gdn-elastic", marks=pytest.mark.slow),
    pytest.param("reader-mamba2", NO_BUFFER, id="mamba2-no_buffer", marks=pytest.mark.slow),
    pytest.param("kda", (), id="kda", marks=pytest.mark.slow),
    pytest.param("reader-gdn", ("--hybrid-cpu-event-loop", "overlap", "--page-size", "64"), id="gdn-overlap-pages",
                 marks=pytest.mark.slow),
    pytest.param("reader-gdn", ("--tp-size", "2"), id="gdn-ranks", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture
def together(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., list[Client]]]:
    """Servers that know each other, started with some flags."""
    running: list[Server] = []

    def start(preset: str, *flags: str, count: int = 2, key: str = "") -> list[Client]:
        if "--tp-size" in flags:
            monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        ports = [free_port() for _ in range(count)]
        others = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        keys = ("--api-key", key) if key else ()
        for port in ports:
            log = tmp_path / f"{port}.log"
            running.append(
                Server(models(preset), [*ON, "--hybrid-segment-peers", others, *keys, *flags], port=port, log=log)
            )
        for server in running:
            server.wait_ready(PATIENCE_S)
        return [Client(server, key) for server in running]

    yield start
    for server in running:
        server.stop()


def counts(client: Client) -> dict[str, float]:
    """How many segments went to a server and from it, and how many it made."""
    text = client.get("/metrics")
    found = re.findall(r'^sglang:mamba_cache_events_total{.*?event="(segments_\w+)".*?} (\S+)$', text, re.MULTILINE)
    return {event.removeprefix("segments_"): float(count) for event, count in found}


@pytest.mark.parametrize(("preset", "flags"), CONFIGURATIONS)
def test_answers_are_those_of_composed_prefill_whoever_computed_the_segments(
    together: Callable[..., list[Client]],
    compositions: Callable[[str], Composition],
    preset: str,
    flags: tuple[str, ...],
) -> None:
    clients = together(preset, *flags, "--enable-metrics")
    judge = compositions(preset)
    askers = [Asker(client, judge, seed) for seed, client in enumerate(clients, 1)]
    shared = [askers[0].tokens(n) for n in (300, 280, 200, 350, 90, 260)]

    def asks(asker: Asker, count: int) -> list[tuple[Prompt, Any, Any]]:
        found = []
        for _ in range(count):
            some = asker.rng.sample(shared, 2) + [asker.tokens(n) for n in (300, 250, 70)]
            asker.rng.shuffle(some)
            prompt, segments = asker.prompt(some, asker.rng.choice([1, 20, 130]), asker.rng.choice([0, 3, 40]))
            found.append((prompt, segments, asker.ask(prompt, segments)))
            turn = [*prompt, *found[-1][2]["output_ids"], *asker.tokens(9)]
            found.append((turn, segments, asker.ask(turn, segments)))
        return found

    # One server after the other, which then are idle, and both at once.
    answers = [(asker, asks(asker, 1)) for _ in range(4) for asker in askers]
    with ThreadPoolExecutor(2) as pool:
        answers += zip(askers, pool.map(asks, askers, (4, 4)), strict=True)
    for asker, its in answers:
        for prompt, segments, answer in its:
            asker.check(prompt, answer, segments)
            details = said(answer)
            computed = sum(count for reason, count in details.items() if reason.startswith("miss_"))
            assert details["segment_tokens"] + computed + answer["meta_info"]["cached_tokens"] == len(prompt), details
    told = [counts(client) for client in clients]
    assert sum(each["fetched"] for each in told) >= 4, told
    assert told[0]["fetched"] == told[1]["handed_out"], told
    assert told[1]["fetched"] == told[0]["handed_out"], told


def listed(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(client.get("/hybrid/segments?limit=0"))
    (other,) = [each for each in found["peers"] if not each["is_self"]]
    return {**other, "count": found["count"]}


@pytest.mark.slow
def test_what_another_has_need_not_be_computed_and_a_flush_forgets(
    together: Callable[..., list[Client]], compositions: Callable[[str], Composition]
) -> None:
    one, other = together("reader-gdn", key="the-key")
    asker, second = (Asker(client, compositions("reader-gdn"), 5) for client in (one, other))
    documents = [asker.tokens(n) for n in (300, 310, 320, 330)]
    prompt, segments = asker.prompt(documents, 10)
    first = asker.ask(prompt, segments)
    interiors = sum(map(len, documents)) - 16 * 4
    assert said(first)["miss_segment_cold"] == interiors, "others computed some of it, for this request"
    assert said(first)["segment_tokens"] == 0
    assert said(asker.ask(prompt[:5] + prompt, [(a + 5, b + 5) for a, b in segments]))["segment_tokens"] == interiors
    assert listed(one)["fetched"] >= 1
    prompt, segments = second.prompt(documents[::-1], 10)
    answer = second.ask(prompt, segments)
    second.check(prompt, answer, segments)
    assert said(answer)["segment_tokens"] >= 300, "what the first has is a hit of the second"
    assert listed(other)["count"] == 4
    one.flush()
    assert listed(one)["count"] == 0
    before = listed(one)["fetched"]
    prompt, segments = asker.prompt(documents, 10)
    asker.check(prompt, asker.ask(prompt, segments), segments)
    assert listed(one)["fetched"] > before, "it is asked for again"
    stranger = Client(other.server, "another-key")
    assert stranger.answer("/hybrid/segments/probe", {"names": []})[0] == 401
    assert stranger.answer("/hybrid/segments/parcel", {"form": "f", "segment": documents[0]})[0] == 401


@pytest.mark.slow
def test_a_server_that_goes_away_takes_no_request_along(
    together: Callable[..., list[Client]], compositions: Callable[[str], Composition]
) -> None:
    one, other = together("reader-gdn")
    asker = Asker(one, compositions("reader-gdn"), 6)

    def ask() -> None:
        prompt, segments = asker.prompt([asker.tokens(300) for _ in range(6)], 10)
        asker.check(prompt, asker.ask(prompt, segments), segments)

    ask()
    assert listed(one)["fetched"] >= 1
    timer = threading.Timer(0.15, other.server.process.kill)
    timer.start()
    for _ in range(5):
        ask()
    timer.join()
    other.server.process.wait()
    for _ in range(3):
        ask()
    assert listed(one)["why_not"], "it is known to be away"


@pytest.mark.slow
def test_a_server_with_other_weights_is_left_out(
    together: Callable[..., list[Client]],
    compositions: Callable[[str], Composition],
    models: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    one, other = together("reader-gdn")
    trained = tmp_path / "trained"
    trained.mkdir()
    for file in models("reader-gdn").iterdir():
        (trained / file.name).write_bytes(file.read_bytes())
    (weights,) = trained.glob("model*.safetensors")
    tensors = load_file(weights)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    asker = Asker(one, compositions("reader-gdn"), 7)

    def ask() -> None:
        prompt, segments = asker.prompt([asker.tokens(300) for _ in range(4)], 10)
        asker.check(prompt, asker.ask(prompt, segments), segments)

    ask()
    fetched = listed(one)["fetched"]
    assert fetched >= 1
    assert other.answer("/update_weights_from_disk", {"model_path": str(trained), "load_format": "auto"})[0] == 200
    ask()
    ask()
    assert (listed(one)["fetched"], "weights" in listed(one)["why_not"]) == (fetched, True)
