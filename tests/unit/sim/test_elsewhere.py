"""Text that earlier prompts had at another place is told apart from new text."""

import json
from pathlib import Path

import numpy as np
import pytest

from sglang_hybrid.sim import cli, elsewhere
from sglang_hybrid.sim.trace import Segment, Tokens, Trace, TraceRequest

VOCABULARY = 50_000


def made(prompts: list[Tokens], segments: tuple[Segment, ...] = ()) -> Trace:
    return Trace(
        "t", tuple(TraceRequest(p, len(p), float(i), str(i), segments=segments) for i, p in enumerate(prompts))
    )


def system_text_behind_an_id(count: int, system: int, question: int, fixed: int) -> list[Tokens]:
    """Prompts whose first `fixed` tokens are equal, the next 6 never, then an equal text and a question."""
    rng = np.random.default_rng(3)
    text = rng.integers(0, VOCABULARY, system)
    heads = [np.concatenate([np.full(fixed, 5), rng.integers(0, VOCABULARY, 6), text]) for _ in range(count)]
    return [np.concatenate([head, rng.integers(0, VOCABULARY, question)]).astype(np.int32) for head in heads]


def test_an_id_at_the_head_of_a_system_text_is_found() -> None:
    trace = made(system_text_behind_an_id(40, 3_000, 500, 7))
    found = elsewhere.measure(trace)
    assert found.tokens == pytest.approx(39 * 3_000, rel=0.05)
    assert found.parts == (7,) * 39
    assert "beyond token 7 (median)" in elsewhere.notes(trace)[0]
    assert elsewhere.notes(trace)[0].startswith("about 8")


def test_what_a_prefix_serves_and_what_is_new_is_not_counted() -> None:
    rng = np.random.default_rng(4)
    shared = rng.integers(0, VOCABULARY, 2_000)
    prompts = [np.concatenate([shared, rng.integers(0, VOCABULARY, 700)]).astype(np.int32) for _ in range(20)]
    assert elsewhere.measure(made(prompts)) == (0, ())
    assert elsewhere.notes(made(prompts)) == []


def test_what_is_marked_as_a_segment_is_not_counted() -> None:
    prompts = system_text_behind_an_id(20, 3_000, 500, 7)
    assert elsewhere.measure(made(prompts, (Segment(13, 3_013),))).tokens < 20 * elsewhere.WINDOW


def test_an_answer_that_comes_back_in_another_prompt_counts() -> None:
    rng = np.random.default_rng(5)
    first, second = rng.integers(0, VOCABULARY, 4_000).astype(np.int32), rng.integers(0, VOCABULARY, 90)
    requests = (
        TraceRequest(first, 1_000, 0.0, "a"),
        TraceRequest(np.concatenate([second, first[1_000:]]).astype(np.int32), 3_090, 1.0, "b"),
    )
    assert elsewhere.measure(Trace("t", requests)).tokens == pytest.approx(3_000, rel=0.1)


@pytest.mark.parametrize("length", [0, 1, elsewhere.WINDOW - 1, elsewhere.WINDOW, 5_000])
def test_a_window_has_one_name_wherever_it_stands(length: int) -> None:
    tokens = np.random.default_rng(6).integers(0, 2**31, length).astype(np.int32)
    at, names = elsewhere._sampled(tokens)
    moved_at, moved = elsewhere._sampled(np.concatenate([np.arange(123, dtype=np.int32), tokens]))
    inside = moved_at >= 123
    assert (moved_at[inside] - 123).tolist() == at.tolist()
    assert moved[inside].tolist() == names.tolist()
    assert len(at) == pytest.approx(max(0, length - elsewhere.WINDOW + 1) / elsewhere.SAMPLED, rel=0.3, abs=1)


def test_simulate_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"session_id": i, "turn_id": 0, "ts": float(i), "input_tokens": prompt.tolist(), "output_tokens": [1]}
        for i, prompt in enumerate(system_text_behind_an_id(12, 1_000, 200, 7))
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    argv = [str(path), "--policy", "lru", "--capacity-gb", "1", "--jobs", "1"]
    assert cli.main(argv) == 0
    assert "note: t: about " in capsys.readouterr().out
    assert cli.main([*argv, "--no-ceilings"]) == 0
    assert "note: t: about " not in capsys.readouterr().out
