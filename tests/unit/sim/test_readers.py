"""Every trace format, read from small files written here; every complaint names its line."""

import array
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.sim.readers import FORMATS, marconi, read_trace
from sglang_hybrid.sim.readers.text import tokenize
from sglang_hybrid.sim.trace import TraceError
from sglang_hybrid.sim.workloads import generate

NAMES = (None, *FORMATS)
KEYS = (
    *("input_tokens", "output_tokens", "ts", "turn_id", "session_id", "num_input_tokens", "timestamp", "hash_ids"),
    *("input_length", "output_length", "event", "obj", "out", "input_ids", "output_ids", "text", "meta_info"),
    *("e2e_latency", "messages", "conversations", "body", "role", "from", "content", "value", "response", "choices"),
    *("contexttokens", "generatedtokens", "sampling_params", "custom_params", "cache_boundaries", "extra_key", "rid"),
)
STARTS = (
    b"",
    b"[",
    b"[5,{",
    b"\x1f\x8b",
    b"\x28\xb5\x2f\xfd",
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n",
    b"[2026] ",
)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def marconi_row(**changes: Any) -> dict[str, Any]:
    row = {"session_id": 3, "turn_id": 0, "ts": 1.5, "input_tokens": [1, 2], "output_tokens": [3]}
    return row | {"num_input_tokens": 2, "num_output_tokens": 1} | changes


def test_marconi_rows(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", marconi_row(), marconi_row(ts=0.5, turn_id=1)))
    assert [(r.session, r.turn, r.ts, r.n_input) for r in trace.requests] == [("3", 1, 0.0, 2), ("3", 0, 1.0, 2)]
    assert trace.requests[0].tokens.tolist() == [1, 2, 3]


def test_marconi_round_trip_keeps_every_request(tmp_path: Path) -> None:
    trace = generate("sharegpt", 4, sessions=3)
    marconi.write(trace, tmp_path / "t.jsonl")
    again = read_trace(tmp_path / "t.jsonl")
    assert len(again) == len(trace)
    for a, b in zip(trace.requests, again.requests, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert (a.n_input, a.ts, a.session, a.turn) == (b.n_input, b.ts, b.session, b.turn)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "not a line of JSON"),
        ("[1, 2]", "must be a JSON object"),
        (marconi_row(input_tokens=[1, -5]), "token ids must lie in"),
        (marconi_row(input_tokens=[2**40]), "token ids must lie in"),
        (marconi_row(input_tokens="abc"), "input_tokens must be a list"),
        (marconi_row(input_tokens=[], num_input_tokens=0), "at least one input token"),
        (marconi_row(num_input_tokens=7), "num_input_tokens says 7"),
        (marconi_row(ts="soon"), "ts must be a number"),
        ({"input_tokens": [1], "output_tokens": []}, "lacks a key: ts"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "t.jsonl", marconi_row(), "", row)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith("t.jsonl:3: ")


def test_files_that_hold_nothing_or_nothing_known(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="trace file is empty"):
        read_trace(write(tmp_path / "empty.jsonl", "", "  "))
    with pytest.raises(TraceError, match="no known trace format"):
        read_trace(write(tmp_path / "odd.jsonl", {"a": 1}))
    with pytest.raises(TraceError, match="no such trace file"):
        read_trace(tmp_path / "missing.jsonl")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(TraceError, match="not a line of JSON"):
        read_trace(binary)
    with pytest.raises(ConfigError, match="unknown trace format"):
        read_trace(write(tmp_path / "t.jsonl", marconi_row()), "pcap")


def test_mooncake_blocks_are_shared_exactly_as_hashed(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl",
        {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [7, 9, 11]},
        {"timestamp": 3052, "input_length": 1500, "output_length": 2, "hash_ids": [7, 9, 12]},
        {"timestamp": 4000, "input_length": 600, "output_length": 0, "hash_ids": [7]},
    )
    a, b, c = read_trace(path).requests
    assert (a.ts, b.ts) == (0.0, 3.052)
    assert (a.n_input, a.n_output, b.n_input, c.n_input) == (1100, 3, 1500, 600)
    same = a.input_tokens[:1100] == b.input_tokens[:1100]
    assert same[:1024].all()
    assert not same[1024:].any()
    assert (a.input_tokens[:512] == c.input_tokens[:512]).all()
    everything = np.concatenate([a.output_tokens, b.output_tokens, c.input_tokens[512:], a.input_tokens])
    assert len(np.unique(everything)) == len(everything)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1, 2]}, "cannot hold this many"),
        ({"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": ["x"]}, "hash_ids must be integers"),
        ({"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}, "input_length must be at least 1"),
        ({"timestamp": 0, "input_length": 2**31, "hash_ids": []}, "a request of more than"),
        ({"timestamp": 10**400, "input_length": 1, "hash_ids": []}, "a number of ordinary size"),
    ],
)
def test_impossible_mooncake_rows(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "m.jsonl", row))


class GenerateReqInput:
    """A stand-in with the attributes that SGLang's request object has."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


def dump(path: Path, *records: object) -> Path:
    path.write_bytes(pickle.dumps({"server_args": GenerateReqInput(a=1), "requests": list(records)}))
    return path


def test_a_pickled_sglang_dump(tmp_path: Path) -> None:
    records = (
        (GenerateReqInput(input_ids=[1, 2], session_id="s", text=None), {"output_ids": [3]}, 100.0, 101.0),
        (GenerateReqInput(input_ids=(4, 5, 6), rid="r"), {"output_ids": array.array("q", [7])}, 99.0, 101.0),
        (GenerateReqInput(text="hello there", rid="t"), {"text": "general"}, 102.0, 103.0),
    )
    requests = read_trace(dump(tmp_path / "d.pkl", *records)).requests
    assert [(r.session, r.ts) for r in requests] == [("r", 0.0), ("s", 1.0), ("t", 3.0)]
    assert requests[0].tokens.tolist() == [4, 5, 6, 7]
    assert requests[2].input_tokens.tolist() == tokenize("hello there").tolist()


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(TraceError, match="request 1"):
        read_trace(dump(tmp_path / "d.pkl", Bomb(target)))
    assert not target.exists()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ((GenerateReqInput(input_ids=None, text=None), {}, 1.0, 2.0), "no tokens and no text"),
        ((GenerateReqInput(input_ids=[[1], [2]]), {}, 1.0, 2.0), "batched requests"),
        ((GenerateReqInput(input_ids=[1]), {}), "a record is"),
    ],
)
def test_bad_records_of_a_dump_are_counted(tmp_path: Path, record: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(dump(tmp_path / "d.pkl", record))


def test_a_truncated_pickle(tmp_path: Path) -> None:
    path = dump(tmp_path / "d.pkl", (GenerateReqInput(input_ids=[1]), {}, 1.0, 2.0))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="not a readable SGLang request dump"):
        read_trace(path)


def test_a_json_log_counts_finished_requests_from_their_arrival(tmp_path: Path) -> None:
    def event(kind: str, second: int, ids: list[object]) -> dict[str, Any]:
        out = {"output_ids": [9], "meta_info": {"e2e_latency": 2.0}}
        obj = {"input_ids": ids, "rid": f"r{second}"}
        return {"timestamp": f"2026-01-01T00:00:{second:02}", "event": kind, "rid": "r", "obj": obj, "out": out}

    path = write(
        tmp_path / "log.jsonl",
        event("request.received", 1, [1, 2]),
        event("request.finished", 5, [1, 2]),
        event("request.finished", 12, [1, 2, 3]),
    )
    assert [(r.session, r.ts, r.n_input) for r in read_trace(path).requests] == [("r5", 0.0, 2), ("r12", 7.0, 3)]
    odd = event("request.finished", 5, [1])
    odd["out"]["meta_info"]["e2e_latency"] = "long"
    with pytest.raises(TraceError, match="e2e_latency must be a number"):
        read_trace(write(tmp_path / "odd.jsonl", odd))
    with pytest.raises(TraceError, match="seconds or ISO 8601"):
        read_trace(write(tmp_path / "when.jsonl", event("request.finished", 5, [1]) | {"timestamp": "noon"}))
    with pytest.raises(TraceError, match="the log was cut"):
        read_trace(write(tmp_path / "cut.jsonl", event("request.finished", 5, [1, "...", 2])))


def test_a_conversation_becomes_one_request_per_answer(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a radix tree?"},
        {"role": "assistant", "content": "A compressed trie."},
        {"role": "user", "content": "one two three"},
        {"role": "assistant", "content": "Good."},
    ]
    first, second = read_trace(write(tmp_path / "c.jsonl", {"messages": messages, "ts": 10.0})).requests
    assert np.array_equal(second.input_tokens[: len(first.tokens)], first.tokens)
    assert first.output_tokens.tolist() == tokenize("A compressed trie.").tolist()
    assert (first.turn, second.turn, second.ts) == (0, 1, 2.0)  # three words at 1.5 words a second


def test_conversation_dialects(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.jsonl",
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"body": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}},
        {"messages": [{"role": "user", "content": "hi"}], "response": {"choices": [{"message": {"content": "yo"}}]}},
    )
    a, b, c = read_trace(path, "chat").requests
    assert a.input_tokens.tolist() == b.input_tokens.tolist() == c.input_tokens.tolist()
    assert (a.n_output, b.n_output, c.output_tokens.tolist()) == (1, 0, tokenize("yo").tolist())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": ["hi"]}, "a message must be an object"),
        ({"messages": [{"content": "hi"}]}, "needs a role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content must be text"),
        ({"messages": [{"role": "user", "content": "a"}], "ts": "yesterday"}, "seconds or ISO 8601"),
    ],
)
def test_bad_conversations(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "c.jsonl", row))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(KEYS), json_values, max_size=8) | st.binary(max_size=40),
    st.sampled_from(NAMES),
    st.sampled_from(STARTS),
    st.booleans(),
)
@settings(max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_anything_gives_a_valid_trace_or_a_trace_error(
    tmp_path: Path, content: object, name: str | None, start: bytes, skip: bool
) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(start + (content if isinstance(content, bytes) else json.dumps(content).encode()))
    try:
        trace = read_trace(path, name, skip_bad=skip)
    except TraceError:
        return
    trace.check()


def test_the_fallback_tokenizer_is_prefix_stable_and_fixed() -> None:
    assert tokenize("").tolist() == []
    text = "The quick brown fox, jumping; über den Zaun 日本語"
    assert tokenize(text + " and more").tolist()[: len(tokenize(text))] == tokenize(text).tolist()
    assert tokenize("ab c").tolist() == [511920237, 15075007]


def test_segments_of_sglang_rows(tmp_path: Path) -> None:
    marked = {"sampling_params": {"custom_params": {"segments": [[0, 2], [2, 5]]}}}
    row = {"ts": 0.0, "input_ids": list(range(10)), "output_ids": [1], **marked}
    other = {**row, "extra_key": "tenant"}
    a, b, c = read_trace(write(tmp_path / "t.jsonl", row, other, {**other, "ts": 1.0})).requests
    assert a.segments == ((0, 2, -1), (2, 5, -1))
    assert [each[:2] for each in b.segments] == [(0, 2), (2, 5)]
    assert b.segments == c.segments, "a tenant has them for itself"
    assert b.segments[0].name != b.segments[1].name
    assert b.segments[0].name >= 0
    for segments, message in (
        ([[0, 2], [1, 5]], "must not overlap"),
        ([[0, 11]], "lie in the 10 tokens"),
        ([[0]], "pairs of token positions"),
        ("0-2", "segments must be a list"),
    ):
        bad = {**row, "sampling_params": {"custom_params": {"segments": segments}}}
        with pytest.raises(TraceError, match=message) as caught:
            read_trace(write(tmp_path / "t.jsonl", row, bad))
        assert str(caught.value).startswith("t.jsonl:2: ")
    text = {"ts": 0.0, "text": "hello there", **marked}
    trace = read_trace(write(tmp_path / "t.jsonl", text), "sglang-jsonl")
    assert trace.requests[0].segments == ()
    assert any("segments count real tokens" in note for note in trace.notes)


def test_segments_of_chats(tmp_path: Path) -> None:
    def part(text: str, marked: bool = True) -> dict[str, str]:
        return {"type": "text", "text": text} | ({"cache": "segment"} if marked else {})

    parts = [part("Use ", False), part("these:", False), part("a document"), part("another one"), part(" What?", False)]
    messages: list[dict[str, Any]] = [
        {"role": "tool", "content": "a result", "cache": "segment"},
        {"role": "user", "content": parts},
    ]
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    plain[1]["content"] = [part(each["text"], False) for each in parts]
    first, second = read_trace(
        write(tmp_path / "t.jsonl", {"ts": 0, "messages": messages}, {"ts": 1, "messages": plain})
    ).requests
    texts = [first.tokens[start:end].tolist() for start, end, _ in first.segments]
    assert texts == [tokenize(text).tolist() for text in ("a result", "a document", "another one")]
    assert first.segments[1].end == first.segments[2].start
    assert second.segments == ()
    assert first.tokens[: first.segments[1].start].tolist() == second.tokens[: first.segments[1].start].tolist()
    answered = [*messages, {"role": "assistant", "content": "so"}, {"role": "user", "content": [part("more")]},
                {"role": "assistant", "content": "yes"}]  # fmt: skip
    turns = read_trace(write(tmp_path / "t.jsonl", {"messages": answered})).requests
    assert [len(turn.segments) for turn in turns] == [3, 4]
    assert turns[1].segments[:3] == turns[0].segments
    bad = {"role": "user", "content": [{"type": "text", "text": "", "cache": "segment"}]}
    assert read_trace(write(tmp_path / "t.jsonl", {"messages": [bad]})).requests[0].segments == ()
