"""Text that earlier prompts had at another place is told apart from new text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hybrid.sim import cli, elsewhere, grid
from sglang_hybrid.sim.reuse import ReuseIndex
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
    found = elsewhere.measure(ReuseIndex(trace))
    assert found.tokens == pytest.approx(39 * 3_000, rel=0.05)
    assert found.parts == (7,) * 39
    assert "beyond token 7 (median)" in elsewhere.notes(ReuseIndex(trace))[0]
    assert elsewhere.notes(ReuseIndex(trace))[0].startswith("about 8")


def test_what_a_prefix_serves_and_what_is_new_is_not_counted() -> None:
    rng = np.random.default_rng(4)
    shared = rng.integers(0, VOCABULARY, 2_000)
    prompts = [np.concatenate([shared, rng.integers(0, VOCABULARY, 700)]).astype(np.int32) for _ in range(20)]
    assert elsewhere.measure(ReuseIndex(made(prompts))) == (0, ())
    assert elsewhere.notes(ReuseIndex(made(prompts))) == []


def test_what_is_marked_as_a_segment_is_not_counted() -> None:
    prompts = system_text_behind_an_id(20, 3_000, 500, 7)
    assert elsewhere.measure(ReuseIndex(made(prompts, (Segment(13, 3_013),)))).tokens < 20 * elsewhere.WINDOW


def test_an_answer_that_comes_back_in_another_prompt_counts() -> None:
    rng = np.random.default_rng(5)
    first, second = rng.integers(0, VOCABULARY, 4_000).astype(np.int32), rng.integers(0, VOCABULARY, 90)
    requests = (
        TraceRequest(first, 1_000, 0.0, "a"),
        TraceRequest(np.concatenate([second, first[1_000:]]).astype(np.int32), 3_090, 1.0, "b"),
    )
    assert elsewhere.measure(ReuseIndex(Trace("t", requests))).tokens == pytest.approx(3_000, rel=0.1)


def one_by_one(trace: Trace) -> tuple[int, tuple[int, ...]]:
    """`measure`, prompt after prompt with a set of what came before."""
    known: set[int] = set()
    tokens, parts = 0.0, []
    for request, shared in zip(trace.requests, ReuseIndex(trace).seen_tokens.tolist(), strict=True):
        at, names = elsewhere._sampled(request.tokens)
        behind = (at >= shared) & (at + elsewhere.WINDOW <= request.n_input)
        for segment in request.segments:
            behind &= (at < segment.start) | (at >= segment.end)
        if looked_for := names[behind].tolist():
            share = sum(name in known for name in looked_for) / len(looked_for)
            marked = sum(max(0, segment.end - max(segment.start, shared)) for segment in request.segments)
            tokens += share * (request.n_input - shared - marked)
            parts += [shared] if share > 0.5 else []
        known.update(names.tolist())
    return round(tokens), tuple(parts)


@pytest.mark.parametrize("at_once", [1, 5_000, 1 << 20])
def test_many_prompts_at_once_are_measured_as_one_by_one(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "_AT_ONCE", at_once)
    rng = np.random.default_rng(7)
    texts = [rng.integers(0, VOCABULARY, n) for n in (70, 300, 700, 1_500)]
    requests = []
    for number in range(120):
        parts = [texts[int(each)] for each in rng.integers(0, 4, rng.integers(0, 3))]
        new = [rng.integers(0, VOCABULARY, int(n)) for n in rng.integers(1, 200, len(parts) + 1)]
        tokens = np.concatenate([part for pair in zip(new, [*parts, texts[0][:0]], strict=True) for part in pair])
        marked = (Segment(len(new[0]), len(new[0]) + len(parts[0])),) if parts and number % 3 == 0 else ()
        requests.append(TraceRequest(tokens.astype(np.int32), len(tokens), float(number), "a", segments=marked))
    trace = Trace("t", tuple(requests))
    found = elsewhere.measure(ReuseIndex(trace))
    assert found == one_by_one(trace)
    assert found.tokens > 10_000


@pytest.mark.parametrize("length", [0, 1, elsewhere.WINDOW - 1, elsewhere.WINDOW, 5_000])
def test_a_window_has_one_name_wherever_it_stands(length: int) -> None:
    tokens = np.random.default_rng(6).integers(0, 2**31, length).astype(np.int32)
    at, names = elsewhere._sampled(tokens)
    moved_at, moved = elsewhere._sampled(np.concatenate([np.arange(123, dtype=np.int32), tokens]))
    inside = moved_at >= 123
    assert (moved_at[inside] - 123).tolist() == at.tolist()
    assert moved[inside].tolist() == names.tolist()
    assert len(at) == pytest.approx(max(0, length - elsewhere.WINDOW + 1) / elsewhere.SAMPLED, rel=0.3, abs=1)


def test_a_trace_is_read_once_and_indexed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300,000 requests each takes seconds; and the next command reads what stands in the file then."""
    counts = {"read": 0, "indexed": 0}

    def counted(what: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(grid, "read_trace", counted("read", grid.read_trace))
    monkeypatch.setattr(grid, "ReuseIndex", counted("indexed", grid.ReuseIndex))
    path = tmp_path / "t.jsonl"
    row = {"session_id": 0, "turn_id": 0, "ts": 0.0, "input_tokens": [1, 2, 3], "output_tokens": [1]}
    for times in (1, 2):
        path.write_text((json.dumps(row) + "\n") * times)
        assert cli.main([str(path), "--capacity-gb", "1", "--jobs", "1", "--json", str(tmp_path / "o.json")]) == 0
        assert counts == {"read": times, "indexed": times}
        assert json.loads((tmp_path / "o.json").read_text())["cells"][0]["requests"] == times


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
