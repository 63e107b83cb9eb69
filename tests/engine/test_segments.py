"""Segments in real servers: every answer is held against composed prefill by its definition (`composition.py`)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sglang_hybrid.core.segments import segment_costs
from sglang_hybrid.core.spec import from_config
from sglang_hybrid.segment.geometry import Range
from tests.engine.composition import Composition
from tests.engine.support import Client, Prompt, eventually

ON = ("--hybrid-segments", "on", "--hybrid-segment-dtype", "float32", "--hybrid-segment-memory-gb", "0.2")
ELASTIC = ("--hybrid-memory", "elastic", "--hybrid-cpu-memory-gb", "0.03")
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer")
N_GRAMS = (
    "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8", "--speculative-ngram-capacity", "100000",
)  # fmt: skip
DELTA_RULES = pytest.mark.parametrize("preset", ["reader-gdn", "kda"])
SEAMS = 8 + 8
LOGPROB_ERROR = 2e-4
"""Between two float32 implementations; a wrong state, window or rotation is off by hundredths and more."""

CONFIGURATIONS = [
    pytest.param("reader-gdn", (), id="gdn"),
    pytest.param("reader-mamba2", NO_BUFFER, id="mamba2-no_buffer"),
    pytest.param("reader-gdn", ("--page-size", "64", "--chunked-prefill-size", "512"), id="gdn-pages",
                 marks=pytest.mark.slow),
    pytest.param("reader-mamba2", ("--chunked-prefill-size", "256"), id="mamba2-chunks", marks=pytest.mark.slow),
    pytest.param("reader-gdn", ("--hybrid-cpu-event-loop", "overlap"), id="gdn-overlap", marks=pytest.mark.slow),
    pytest.param("reader-gdn", ELASTIC, id="gdn-elastic", marks=pytest.mark.slow),
    pytest.param("reader-mamba2", (*NO_BUFFER, *ELASTIC), id="mamba2-elastic", marks=pytest.mark.slow),
    pytest.param("reader-gdn", N_GRAMS, id="gdn-n-grams", marks=pytest.mark.slow),
    pytest.param("reader-mamba2", (*N_GRAMS, *NO_BUFFER), id="mamba2-n-grams", marks=pytest.mark.slow),
    pytest.param("kda", (), id="kda"),
    pytest.param("kda", ("--page-size", "64", "--chunked-prefill-size", "512"), id="kda-pages", marks=pytest.mark.slow),
    pytest.param("kda", (*NO_BUFFER, "--chunked-prefill-size", "256"), id="kda-no_buffer", marks=pytest.mark.slow),
    pytest.param("kda", ("--hybrid-cpu-event-loop", "overlap"), id="kda-overlap", marks=pytest.mark.slow),
]  # fmt: skip


class Asker:
    """Asks a server over segments, and a composition what it should have said."""

    def __init__(self, client: Client, judge: Composition, seed: int) -> None:
        self.client, self.judge = client, judge
        self.rng = random.Random(seed)

    def tokens(self, count: int) -> Prompt:
        return [self.rng.randrange(20, min(1200, len(self.judge.head))) for _ in range(count)]

    def prompt(
        self, documents: Sequence[Prompt], lead: int, gap: int = 0, tail: int = 20
    ) -> tuple[Prompt, list[Range]]:
        """A prompt over `documents`, with other text before, between and behind them; and where they lie."""
        found: list[Range] = []
        prompt = self.tokens(lead)
        for document in documents:
            found.append((len(prompt), len(prompt) + len(document)))
            prompt = prompt + document + self.tokens(gap)
        return prompt + self.tokens(tail), found

    def ask(self, prompt: Prompt, segments: Sequence[Range] = (), tokens: int = 5, salt: str = "") -> dict[str, Any]:
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        if segments:
            sampling["custom_params"] = {"segments": [list(each) for each in segments]}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        found: dict[str, Any] = self.client.post("/generate", body | ({"extra_key": salt} if salt else {}))
        return found

    def check(
        self, prompt: Prompt, answer: dict[str, Any], composed: Sequence[Range], states: Tensor | None = None
    ) -> None:
        """`answer` is what the prompt gives if `composed` are reused, and everything else is run.

        `states`: those of the judge, if they are known.
        """
        wanted = self.judge.logprobs(prompt, answer["output_ids"], composed, states)
        given = [each[0] for each in answer["meta_info"]["output_token_logprobs"]]
        worst = max(abs(a - b) for a, b in zip(given, wanted.tolist(), strict=True))
        assert worst < LOGPROB_ERROR, (len(prompt), composed, worst, list(said(answer).items()))


def said(answer: dict[str, Any]) -> dict[str, int]:
    details: dict[str, int] = answer["meta_info"]["cached_tokens_details"]
    return details


@pytest.mark.parametrize(("preset", "flags"), CONFIGURATIONS)
def test_answers_over_segments_are_those_of_composed_prefill(
    serve: Callable[..., Client], compositions: Callable[[str], Composition], preset: str, flags: tuple[str, ...]
) -> None:
    asker = Asker(serve(preset, *ON, *flags), compositions(preset), seed=1)
    asker.client.flush()
    documents = [asker.tokens(n) for n in (64, 90, 100, 150, 200)]
    reused = 0
    for _ in range(10):
        some = asker.rng.sample(documents, asker.rng.randint(1, 4))
        prompt, segments = asker.prompt(some, asker.rng.choice([1, 20, 130]), asker.rng.choice([0, 3, 40]))
        answer = asker.ask(prompt, segments)
        asker.check(prompt, answer, segments)
        details = said(answer)
        computed = sum(count for name, count in details.items() if name.startswith("miss_"))
        assert details["segment_tokens"] + computed + answer["meta_info"]["cached_tokens"] == len(prompt), details
        reused += details["segment_tokens"]
        again = prompt + answer["output_ids"] + asker.tokens(9)
        second = asker.ask(again, segments)
        asker.check(again, second, segments)
    assert reused > 1000


@DELTA_RULES
def test_a_segment_at_the_start_gives_what_a_whole_prefill_gives(
    serve: Callable[..., Client], compositions: Callable[[str], Composition], preset: str
) -> None:
    """Nothing lies before it, so that nothing is approximated: transition, window and keys must all be right."""
    asker = Asker(serve(preset, *ON), compositions(preset), seed=2)
    document = asker.tokens(150)
    for _ in range(3):
        prompt, segments = asker.prompt([document], 0)
        asker.check(prompt, asker.ask(prompt, segments), [])


@DELTA_RULES
def test_a_second_turn_over_composed_context_hits(
    serve: Callable[..., Client], compositions: Callable[[str], Composition], preset: str
) -> None:
    asker = Asker(serve(preset, *ON), compositions(preset), seed=3)
    prompt, segments = asker.prompt([asker.tokens(n) for n in (120, 90)], lead=30)
    first = asker.ask(prompt, segments)
    turn = prompt + first["output_ids"] + asker.tokens(12)
    second = asker.ask(turn, segments)
    assert second["meta_info"]["cached_tokens"] >= len(prompt)
    asker.check(turn, second, segments)
    # The same text without marks is another prompt: it is computed as a whole, and no approximation serves it.
    plain = asker.ask(turn)
    assert plain["meta_info"]["cached_tokens"] < segments[0][1]
    asker.check(turn, plain, [])
    marked = asker.ask(turn + asker.tokens(5), segments)
    assert marked["meta_info"]["cached_tokens"] >= len(prompt)


def test_what_is_cached_exactly_is_not_composed(
    serve: Callable[..., Client], compositions: Callable[[str], Composition]
) -> None:
    asker = Asker(serve("reader-gdn", *ON), compositions("reader-gdn"), seed=4)
    prompt, segments = asker.prompt([asker.tokens(n) for n in (120, 100)], lead=30, tail=2)
    document = asker.tokens(110)
    asker.ask(prompt)  # unmarked: exact, and cached up to its end
    longer = prompt + document + asker.tokens(15)
    answer = asker.ask(longer, [*segments, (len(prompt), len(prompt) + len(document))])
    exact = answer["meta_info"]["cached_tokens"]
    assert exact >= segments[1][0]
    asker.check(longer, answer, [(len(prompt), len(prompt) + len(document))])


@DELTA_RULES
def test_requests_without_marks_are_served_as_ever_beside_marked_ones(
    serve: Callable[..., Client], compositions: Callable[[str], Composition], preset: str
) -> None:
    asker = Asker(serve(preset, *ON), compositions(preset), seed=5)
    documents = [asker.tokens(n) for n in (80, 120, 160)]
    wanted: list[tuple[Prompt, list[Range]]] = []
    for number in range(24):
        prompt, segments = asker.prompt(asker.rng.sample(documents, 2), asker.rng.randint(1, 60))
        wanted.append((prompt, segments if number % 3 else []))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: asker.ask(*each), wanted))
    for (prompt, segments), answer in zip(wanted, answers, strict=True):
        asker.check(prompt, answer, segments)


def test_tenants_share_no_segments(serve: Callable[..., Client], compositions: Callable[[str], Composition]) -> None:
    asker = Asker(serve("reader-gdn", *ON), compositions("reader-gdn"), seed=6)
    document = asker.tokens(140)
    one, two, again = (asker.prompt([document], lead) for lead in (10, 20, 30))
    assert said(asker.ask(*one, salt="a"))["segment_tokens"] == 0
    assert said(asker.ask(*two, salt="b"))["segment_tokens"] == 0
    assert said(asker.ask(*again, salt="a"))["segment_tokens"] == 124


def test_an_emptied_cache_has_no_segments(
    serve: Callable[..., Client], compositions: Callable[[str], Composition]
) -> None:
    asker = Asker(serve("reader-gdn", *ON), compositions("reader-gdn"), seed=7)
    document = asker.tokens(140)
    asker.ask(*asker.prompt([document], 10))
    assert said(asker.ask(*asker.prompt([document], 11)))["segment_tokens"] == 124
    asker.client.flush()
    answer = said(asker.ask(*asker.prompt([document], 12)))
    assert (answer["segment_tokens"], answer["miss_segment_cold"]) == (0, 124), "what was emptied left for no other"


def test_new_weights_drop_segments(
    serve: Callable[..., Client], compositions: Callable[[str], Composition], models: Callable[[str], Path]
) -> None:
    asker = Asker(serve("reader-gdn", *ON), compositions("reader-gdn"), seed=12)
    document, (one, two) = asker.tokens(140), (asker.tokens(10), asker.tokens(11))
    asker.ask([*one, *document, 30], [(10, 150)])
    assert asker.client.post("/update_weights_from_disk", {"model_path": str(models("reader-gdn"))})["success"]
    prompt, segments = [*two, *document, 30], [(11, 151)]
    answer = asker.ask(prompt, segments)
    assert (said(answer)["segment_tokens"], said(answer)["miss_segment_cold"]) == (0, 124)
    asker.check(prompt, answer, segments)


def test_why_a_segment_is_computed(serve: Callable[..., Client], compositions: Callable[[str], Composition]) -> None:
    asker = Asker(serve("reader-gdn", *ON), compositions("reader-gdn"), seed=8)
    prompt, segments = asker.prompt([asker.tokens(63), asker.tokens(100)], lead=10)
    answer = said(asker.ask(prompt, segments))
    assert answer["miss_segment_short"] == 63
    assert (answer["miss_segment_cold"], answer["miss_segment_seam"]) == (84, 16)
    body = {
        "input_ids": asker.tokens(5) + prompt,
        "sampling_params": {"max_new_tokens": 1, "custom_params": {"segments": [[10, 150]]}},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    assert said(asker.client.post("/generate", body))["miss_segment_ineligible"] == 140


@pytest.mark.parametrize(
    "segments",
    [
        [[0, 5], [3, 9]],
        [[9, 3]],
        [[-1, 4]],
        [[0, 10_000]],
        [[0, 4.0]],
        "all",
        [[0, 4, 5]],
        [[n, n + 1] for n in range(300)],
    ],
)
def test_what_cannot_be_read_is_plain_text(
    serve: Callable[..., Client], compositions: Callable[[str], Composition], segments: Any
) -> None:
    """A client of the native endpoint; those of the others are refused with a 400 before (test_client_segments)."""
    asker = Asker(serve("reader-gdn", *ON), compositions("reader-gdn"), seed=9)
    body = {
        "input_ids": asker.tokens(320),
        "sampling_params": {"max_new_tokens": 1, "custom_params": {"segments": segments}},
    }
    status, text = asker.client.answer("/generate", body)
    assert status in (200, 400), text
    assert asker.client.generate(asker.tokens(9), 2)


def test_clients_that_hang_up_leave_nothing_behind(
    serve: Callable[..., Client], compositions: Callable[[str], Composition]
) -> None:
    asker = Asker(serve("reader-gdn", *ON), compositions("reader-gdn"), seed=10)
    documents = [asker.tokens(n) for n in (150, 150, 150)]
    for _ in range(12):
        prompt, segments = asker.prompt(documents, asker.rng.randint(1, 40))
        asker.rng.shuffle(documents)
        connection = asker.client.asked(prompt)
        connection.close()
        asker.ask(prompt[: segments[1][1]] + asker.tokens(4), segments[:2])
    asker.client.flush()
    prompt, segments = asker.prompt(documents, 7)
    asker.check(prompt, asker.ask(prompt, segments), segments)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "int8"])
def test_heads_that_forget_keep_no_transition(
    serve: Callable[..., Client], models: Callable[[str], Path], compositions: Callable[[str], Composition], dtype: str
) -> None:
    asker = Asker(serve("reader-gdn", *ON, "--hybrid-segment-dtype", dtype), compositions("reader-gdn"), seed=13)
    asker.client.flush()
    documents = [asker.tokens(n) for n in (100, 200, 400)]
    for document in documents:
        prompt, segments = asker.prompt([document], 10)
        asker.ask(prompt, segments)
    costs = segment_costs(from_config(models("reader-gdn"), kv_dtype="float32", conv_dtype="float32"), dtype)
    least = sum(costs.state_bytes + (n - SEAMS) * costs.token_bytes for n in (100, 200, 400))

    def kept() -> int:
        """Transitions of the three segments, by their bytes."""
        return (json.loads(asker.client.get("/hybrid/segments"))["bytes"] - least) // costs.transition_bytes

    assert eventually(lambda: kept() < 3 * costs.transitions), "of three segments"
    share = json.loads(asker.client.get("/hybrid/segments"))["transitions_kept"]
    assert 0.2 < share < 0.7, "some heads remember a long text"
    assert kept() == round(share * 3 * costs.transitions)
    if dtype == "float32":
        prompt, segments = asker.prompt(documents, 30)
        asker.check(prompt, asker.ask(prompt, segments), segments)


@pytest.mark.slow
def test_a_segment_that_is_all_seams_is_computed_as_a_whole(
    serve: Callable[..., Client], compositions: Callable[[str], Composition]
) -> None:
    asker = Asker(serve("reader-gdn", *ON, "--hybrid-seam-tokens", "64"), compositions("reader-gdn"), seed=14)
    documents = [asker.tokens(n) for n in (70, 110, 130)]  # two seams of 64 leave no interior that fills a window
    for _ in range(2):
        prompt, segments = asker.prompt(documents, asker.rng.randint(5, 60))
        answer = asker.ask(prompt, segments)
        assert said(answer)["miss_segment_short"] == 70 + 110 + 130
        asker.check(prompt, answer, [])


@pytest.mark.slow
def test_little_memory_is_shared_by_worth(
    serve: Callable[..., Client], compositions: Callable[[str], Composition]
) -> None:
    """Room for a few entries only: every answer is right for what was reused, and the hot document stays."""
    flags = ("--hybrid-segments", "on", "--hybrid-segment-dtype", "float32", "--hybrid-segment-memory-gb", "0.004")
    asker = Asker(serve("reader-gdn", *flags), compositions("reader-gdn"), seed=11)
    hot, hits = asker.tokens(150), 0
    for number in range(30):
        prompt, segments = asker.prompt([asker.tokens(150), hot], asker.rng.randint(1, 50))
        answer = asker.ask(prompt, segments)
        details = said(answer)
        composed = segments[1:] if details.get("miss_segment_refused") else segments
        asker.check(prompt, answer, composed)
        hits += number > 0 and details["segment_tokens"] >= 134
    assert hits >= 25


@pytest.mark.slow
@DELTA_RULES
def test_two_ranks_compose_alike(
    serve: Callable[..., Client],
    compositions: Callable[[str], Composition],
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    asker = Asker(serve(preset, *ON, "--tp-size", "2"), compositions(preset), seed=12)
    documents = [asker.tokens(n) for n in (80, 120, 160)]
    for _ in range(6):
        prompt, segments = asker.prompt(asker.rng.sample(documents, 2), asker.rng.randint(1, 60))
        asker.check(prompt, asker.ask(prompt, segments), segments)
    assert eventually(lambda: asker.client.get("/health_generate") is not None)
