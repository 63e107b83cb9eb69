"""Segments where everything is short: KV, states, memory of segments, passes; with clients that hang up."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest

from sglang_hybrid.segment.geometry import Range
from tests.engine.composition import Composition
from tests.engine.support import Client, Prompt, elastic_metric, eventually
from tests.engine.test_segments import LOGPROB_ERROR, Asker, said

pytestmark = pytest.mark.slow

LENGTHS = (64, 97, 131, 150, 203, 260)

COMMON = (
    "--hybrid-segments", "on", "--hybrid-segment-dtype", "float32", "--max-running-requests", "6",
    "--chunked-prefill-size", "384",
)  # fmt: skip
SHORT = (*COMMON, "--hybrid-segment-memory-gb", "0.003", "--max-total-tokens", "4096", "--max-mamba-cache-size", "24")
ELASTIC = (*COMMON, "--hybrid-memory", "elastic", "--hybrid-cpu-memory-gb", "0.006", "--hybrid-memory-idle-s", "0.5",
           "--enable-metrics")  # fmt: skip
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer")


@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("reader-gdn", SHORT),
        ("reader-gdn", (*SHORT, "--page-size", "64")),
        ("reader-mamba2", (*SHORT, *NO_BUFFER)),
        ("kda", SHORT),
        ("kda", (*SHORT, *NO_BUFFER)),
        ("reader-gdn", ELASTIC),
        ("reader-mamba2", (*ELASTIC, *NO_BUFFER)),
        ("reader-gdn", (*ELASTIC, "--tp-size", "2")),
    ],
    ids=["gdn", "gdn-pages", "mamba2", "kda", "kda-no_buffer", "gdn-elastic", "mamba2-elastic", "gdn-elastic-ranks"],
)
def test_every_answer_is_right_and_everything_comes_back(
    serve: Callable[..., Client],
    compositions: Callable[[str], Composition],
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    flags: tuple[str, ...],
) -> None:
    if "--tp-size" in flags:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    asker = Asker(serve(preset, *flags), compositions(preset), seed=21)
    documents = [asker.tokens(n) for n in LENGTHS] + [asker.tokens(n) for n in LENGTHS]
    asked: list[tuple[Prompt, list[Range]]] = []
    for number in range(60):
        some = asker.rng.sample(documents, asker.rng.randint(1, 3))
        prompt, segments = asker.prompt(some, asker.rng.randint(1, 80), asker.rng.choice([0, 9]))
        asked.append((prompt, segments if number % 4 else []))
    stop = threading.Event()

    def rude() -> None:
        while not stop.is_set():
            prompt, segments = asked[asker.rng.randrange(len(asked))]
            body: dict[str, Any] = {"max_new_tokens": 50, "custom_params": {"segments": [list(s) for s in segments]}}
            connection = asker.client.asked(prompt, **body)
            stop.wait(asker.rng.random() * 0.4)
            connection.close()

    thread = threading.Thread(target=rude)
    thread.start()
    try:
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda each: asker.ask(*each, tokens=20), asked))
    finally:
        stop.set()
        thread.join()
    for (prompt, segments), answer in zip(asked, answers, strict=True):
        judge(asker, prompt, answer, segments)
    # Nothing is held any more: documents that nobody has seen are kept at once, as many as there is room for.
    asker.client.flush()
    assert eventually(lambda: made(asker) > 200)


def test_segments_grow_over_the_budget_and_shrink_for_long_prompts(serve: Callable[..., Client]) -> None:
    asker = Asker(serve("reader-gdn", *ELASTIC), Composition("reader-gdn"), seed=23)
    client = asker.client
    client.flush()
    budget = elastic_metric(client, "granules_budget")

    def used() -> float:
        return elastic_metric(client, "granules_used", "segment")

    documents = [asker.tokens(250) for _ in range(24)]
    for document in documents:
        prompt, segments = asker.prompt([document], 5)
        judge(asker, prompt, asker.ask(prompt, segments), segments)  # what a slow machine cached may be worth more
    assert eventually(lambda: used() > 0.4 * budget), "more than a share of them would have been"
    grown = used()
    found = re.search(r"max_total_num_tokens=(\d+)", client.server.log.read_text())
    assert found is not None
    for _ in range(3):
        prompt = asker.tokens(int(found[1]) * 3 // 4)
        asker.check(prompt, asker.ask(prompt), [])
    assert eventually(lambda: used() < 0.7 * grown)
    prompt, segments = asker.prompt([documents[0], documents[-1]], 7)
    judge(asker, prompt, asker.ask(prompt, segments), segments)
    client.flush()
    assert eventually(lambda: used() < 0.05 * budget), "a block is pinned"
    assert eventually(lambda: elastic_metric(client, "granules_resident") == elastic_metric(client, "granules_pinned"))


def judge(asker: Asker, prompt: Prompt, answer: dict[str, Any], segments: Sequence[Range]) -> None:
    """The answer is that of some set of composed segments: under pressure any may have been refused, or be exact."""
    given = [each[0] for each in answer["meta_info"]["output_token_logprobs"]]
    errors = {}
    for some in (some for count in range(len(segments), -1, -1) for some in combinations(segments, count)):
        wanted = asker.judge.logprobs(prompt, answer["output_ids"], some).tolist()
        errors[some] = max(abs(a - b) for a, b in zip(given, wanted, strict=True))
        if errors[some] < LOGPROB_ERROR:
            return
    best = asker.judge.logprobs(prompt, answer["output_ids"], min(errors, key=lambda some: errors[some])).tolist()
    found = [round(a - b, 3) for a, b in zip(given, best, strict=True)]
    raise AssertionError((len(prompt), segments, errors, found, answer["meta_info"]["cached_tokens_details"]))


def made(asker: Asker) -> int:
    """Tokens that two new documents of 150 tokens, asked for twice, reuse the second time."""
    documents = [asker.tokens(150), asker.tokens(150)]
    asker.ask(*asker.prompt(documents, 5), tokens=1)
    return said(asker.ask(*asker.prompt(documents, 6), tokens=1))["segment_tokens"]


def test_requests_that_are_retracted_begin_anew(serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang takes running requests back when KV runs out; here it does so every few steps."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "4")
    flags = ("--hybrid-segments", "on", "--hybrid-segment-dtype", "float32", "--hybrid-segment-memory-gb", "0.2")
    asker = Asker(serve("reader-gdn", *flags, "--max-running-requests", "5"), Composition("reader-gdn"), seed=22)
    documents = [asker.tokens(n) for n in LENGTHS]
    asked = [asker.prompt(asker.rng.sample(documents, 2), asker.rng.randint(1, 80)) for _ in range(16)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: asker.ask(*each, tokens=24), asked))
    for (prompt, segments), answer in zip(asked, answers, strict=True):
        asker.check(prompt, answer, segments)
    assert "etract" in asker.client.server.log.read_text(errors="replace")
