"""Trace files as users have them: server logs, arrays, CSV, compressed, folders, cut and broken lines, text."""

import builtins
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from tokenizers import Tokenizer, models, pre_tokenizers

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import preset
from sglang_hybrid.prefix.replay import read_log, replay
from sglang_hybrid.prefix.request_log import VERSION, RecordedDecisions, RequestLog
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints
from sglang_hybrid.sim import cli
from sglang_hybrid.sim.readers import azure, read_trace
from sglang_hybrid.sim.trace import TraceError

ROW = {"input_tokens": [1, 2], "output_tokens": [3], "ts": 1.0}
ROWS = [{**ROW, "ts": float(i), "input_tokens": [i, 2]} for i in range(3)]
CONVERSATION = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "hi"}]


def lines(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def starts(path: Path, **how: Any) -> list[int]:
    return [int(r.tokens[0]) for r in read_trace(path, **how).requests]


def finished(second: int, ids: list[int], made: int = 1, **asked: Any) -> str:
    obj = {"rid": f"r{second}", "text": None, "input_ids": ids, "sampling_params": {"max_new_tokens": 1}, **asked}
    out = {"text": "x", "output_ids": [9], "meta_info": {"e2e_latency": 1.0, "completion_tokens": made}}
    stamp = f"2026-11-22T14:27:{second:02}"
    record = {"timestamp": stamp, "event": "request.finished", "rid": obj["rid"], "obj": obj, "out": out}
    return f"[2026-11-22 14:27:{second:02}] {json.dumps(record)}"


def test_a_servers_log_among_other_lines(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    other = "[2026-11-22 14:27:40] INFO Prefill batch, #new-token: 12"
    both = finished(2, [5, 6]) + finished(3, [7])  # two processes wrote at once
    log.write_text(lines("sglang-hybrid is active:", other, finished(1, [3, 4]), other, "vm | " + both))
    requests = read_trace(log).requests
    assert [(r.session, r.ts, r.input_tokens.tolist()) for r in requests] == [
        ("r1", 0.0, [3, 4]),
        ("r2", 1.0, [5, 6]),
        ("r3", 2.0, [7]),
    ]
    log.write_text(log.read_text() + finished(4, [8])[:-30])
    cut = read_trace(log)
    assert (len(cut), cut.notes) == (3, ("server.log: the last line is cut and was skipped",))


def test_namespaces_boundaries_and_probes_of_a_servers_log(tmp_path: Path) -> None:
    declared = {"custom_params": {"cache_boundaries": [2], "cache_hints": {"back_in_s": 3}}}
    (tmp_path / "s.log").write_text(
        lines(
            finished(1, [3, 4, 5], sampling_params=declared),
            finished(2, [3, 4, 5], extra_key="tenant"),
            finished(3, [3, 4, 5], extra_key="tenant"),
            finished(4, [3, 4, 5], lora_path="adapter"),
            finished(5, [3, 4, 5], rid="HEALTH_CHECK_17"),
        )
    )
    a, b, c, d = read_trace(tmp_path / "s.log").requests
    assert (a.boundaries, a.hints, b.hints) == ((2,), Hints(back_in_s=3.0), NO_HINTS)
    assert b.tokens[0] == c.tokens[0]
    assert len({int(r.tokens[0]) for r in (a, b, d)}) == 3
    assert all(r.tokens[1:].tolist() == [4, 5, 9] for r in (a, b, c, d))
    (tmp_path / "bad.log").write_text(lines(finished(1, [3], sampling_params=declared)))
    with pytest.raises(TraceError, match="positions within the 1 input tokens"):
        read_trace(tmp_path / "bad.log")
    for said, message in (({"final": 1}, "true or false"), ({"back_in_s": "3"}, "and seconds"), ([], "must be a dict")):
        params = {"custom_params": {"cache_hints": said}}
        (tmp_path / "bad.log").write_text(lines(finished(1, [3], sampling_params=params)))
        with pytest.raises(TraceError, match=message):
            read_trace(tmp_path / "bad.log")


def test_an_answer_that_was_logged_in_part_is_said(tmp_path: Path) -> None:
    (tmp_path / "s.log").write_text(lines(finished(1, [3]), finished(2, [3], made=2), finished(3, [4], made=7)))
    (note,) = read_trace(tmp_path / "s.log").notes
    assert note.startswith("2 x: of an answer only the last tokens were logged")


def test_a_log_without_requests_names_the_flags(tmp_path: Path) -> None:
    (tmp_path / "s.log").write_text("[2026-11-22 14:27:40] Receive: obj=GenerateReqInput(rid='a')\n")
    with pytest.raises(TraceError, match="--log-requests-level 3 --log-requests-format json"):
        read_trace(tmp_path / "s.log")


def server_log(path: Path) -> None:
    """What a server of this project writes for four requests, two of another tenant; the last one is still running."""
    log = RequestLog(path, 1 << 20)
    decisions = RecordedDecisions(log, preset("marconi-7b"), "forecast", grid=1)
    prompt = np.arange(10, 30, dtype=np.int32)
    for number, tenant in enumerate((None, "t", "t", None)):
        request = decisions.arrive(f"r{number}", prompt, 5.0 + number, 0, 0, tenant, (8,))
        if number < 3:
            whole = np.concatenate([prompt, np.array([number, 7], np.int32)])
            decisions.finish(request, whole, 5.5 + number, 0)
            decisions.computed(request.id)
    log.close()


@pytest.mark.parametrize("compress", [False, True])
def test_the_projects_own_request_log(tmp_path: Path, compress: bool) -> None:
    path = tmp_path / "requests.log"
    server_log(path)
    if compress:
        path = path.rename(tmp_path / "plain")
        content, path = path.read_bytes(), tmp_path / "requests.log.gz"
        path.write_bytes(gzip.compress(content))
    trace = read_trace(path)
    a, b, c, d = trace.requests
    assert [(r.ts, r.n_input, r.n_output, r.boundaries) for r in trace.requests] == [
        (0.0, 20, 2, (8,)),
        (1.0, 20, 2, (8,)),
        (2.0, 20, 2, (8,)),
        (3.0, 20, 0, (8,)),
    ]
    assert (a.input_tokens == d.input_tokens).all()
    assert (b.input_tokens == c.input_tokens).all()
    assert a.tokens[0] != b.tokens[0]
    assert b.output_tokens.tolist() != c.output_tokens.tolist()  # other answers
    assert trace.name == "requests"
    assert trace.model is not None
    assert trace.model.checkpoint_bytes == preset("marconi-7b").checkpoint_bytes
    assert trace.notes == (f"{path.name}: the log ends before the answers of so many requests: 1",)


def test_a_request_log_that_is_cut_damaged_or_old(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    server_log(path)
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    assert "requests.log: the last line is cut and was skipped" in read_trace(path).notes
    path.write_bytes(b"[4" + content[2:])
    with pytest.raises(TraceError, match=f"version {VERSION}"):
        read_trace(path)


def test_segments_of_a_request_log_have_names(tmp_path: Path) -> None:
    """Tokens are hashes of all before them: that segments are equal at other places is told by their names."""
    named = []
    for file in ("a.log", "b.log"):
        log = RequestLog(tmp_path / file, 1 << 20)
        decisions = RecordedDecisions(log, preset("marconi-7b"), "forecast", grid=1)
        for number, marked in enumerate(([(2, 8, b"A"), (8, 20, b"B")], [(0, 6, b"A")], [])):
            request = decisions.arrive(f"r{number}", np.arange(20, dtype=np.int32), float(number), 0, 0)
            if marked:
                decisions.marked(request, marked)
            cut = 7 if number == 0 and file == "b.log" else 20  # aborted within its prompt
            decisions.finish(request, np.arange(cut, dtype=np.int32), number + 0.5, 0)
            decisions.computed(request.id)
        log.close()
        named.append([r.segments for r in read_trace(tmp_path / file).requests])
    (both, again, none), (cut, _, _) = named
    assert [each[:2] for each in both] == [(2, 8), (8, 20)]
    assert (both[0].name, again[0][:2], none) == (again[0].name, (0, 6), ())
    assert both[0].name != both[1].name
    assert cut == ()
    assert named[1][1][0].name != again[0].name, "every log has a secret of its own"
    replayed = replay(tmp_path / "a.log")
    assert (replayed.requests, replayed.differences, replayed.complete) == (3, [], True)


@pytest.mark.parametrize("version", [7, 8])
def test_a_log_of_a_version_before_is_read(version: int, tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    server_log(path)
    first, *rest = path.read_text().splitlines()
    settings = json.loads(first)[1]
    del settings["pass_states"]
    path.write_text(lines(json.dumps([version, settings]), *map(json.loads, rest)))
    assert [r.segments for r in read_trace(path).requests] == [()] * 4
    assert replay(path).requests == 4
    (_, settings), *_ = read_log(path)
    assert settings["pass_states"] == 3


def test_a_retracted_request_is_one_and_an_id_may_come_again(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    server_log(path)
    first = path.read_text().splitlines()[0]

    def arrive(name: str, now: float, tokens: list[int]) -> list[object]:
        return ["arrive", name, now, 0, 0, 0, 99, [], tokens, [], 0, []]

    lines_ = [arrive("a", 1.0, [1, 2]), arrive("a", 2.0, [1, 2, 3]), ["finish", "a", 3.0, 5, [4, 5], 0]]
    lines_ += [arrive("a", 4.0, [1, 2]), ["finish", "a", 5.0, 1, [], 0]]
    path.write_text(lines(first, *lines_))
    once, again = read_trace(path).requests
    assert (once.ts, once.input_tokens.tolist(), once.output_tokens.tolist()) == (0.0, [1, 2], [3, 4, 5])
    assert (again.ts, again.tokens.tolist(), again.n_output) == (3.0, [1], 0)  # it ended within its prompt


def test_a_json_array_as_sharegpt_is_published(tmp_path: Path) -> None:
    path = tmp_path / "ShareGPT.json"
    unanswered = [*CONVERSATION, {"from": "human", "value": "more"}]
    rows = [{"id": "a", "conversations": CONVERSATION}, {"id": "b", "conversations": []}]
    rows += [{"id": "c", "conversations": unanswered}]
    for text in (json.dumps(rows), json.dumps(rows, indent=2), "\ufeff" + json.dumps(rows) + "\n"):
        path.write_text(text)
        trace = read_trace(path)
        assert [(r.session, r.ts) for r in trace.requests] == [("a", 0.0), ("c", 2.0)]
        assert "conversations without a message were left out" in trace.notes
    path.write_text(json.dumps(rows)[:-10])
    with pytest.raises(TraceError, match=r"entry 3: not JSON, or the array is cut here"):
        read_trace(path)
    assert len(read_trace(path, skip_bad=True)) == 1
    path.write_text('[{"conversations": []}, 3]')
    with pytest.raises(TraceError, match="entry 2: a row must be a JSON object"):
        read_trace(path)


def test_azures_lengths_share_nothing_and_say_so(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4,2\r\n2023-11-16 18:17:05.9799600,4,1"
    )
    trace = read_trace(path)
    assert [(r.ts, r.n_input, r.n_output) for r in trace.requests] == [(0.0, 4, 2), (2.0, 4, 1)]
    tokens = np.concatenate([r.tokens for r in trace.requests])
    assert len(np.unique(tokens)) == len(tokens)
    assert trace.notes == (azure.NOTE,)
    for row, message in (("noon,4,2", "ISO 8601"), ("1,x,2", "contexttokens must be an integer"), ("1,2", "3 columns")):
        path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n1,4,2\n")
        with pytest.raises(TraceError, match=rf"azure.csv:2: .*{message}"):
            read_trace(path)
        assert len(read_trace(path, skip_bad=True)) == 1


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_files(tmp_path: Path, compress: Any) -> None:
    path = tmp_path / "trace.jsonl.gz"  # the content decides, not the suffix
    path.write_bytes(compress(lines(*ROWS).encode()))
    assert starts(path) == [0, 1, 2]
    assert read_trace(path).name == "trace"
    path.write_bytes(path.read_bytes() + compress(lines({**ROW, "ts": 3.0}).encode()))  # as an appended file
    assert starts(path) == [0, 1, 2, 1]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TraceError, match="cut or damaged"):
        read_trace(path)


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name in ("zstandard", "tokenizers"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(zstandard.compress(lines(ROW).encode()))
    tokenizer(tmp_path)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TraceError, match="pip install zstandard"):
        read_trace(path)
    with pytest.raises(TraceError, match="pip install tokenizers"):
        read_trace(path, tokenizer=tmp_path)


def test_a_folder_is_one_trace(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with pytest.raises(TraceError, match="folder holds no trace file"):
        read_trace(folder)
    (folder / ".hidden").write_text("no trace")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[1]).encode()))
    (folder / "a.jsonl").write_text(lines(ROWS[0], ROWS[2]))
    (folder / "c.jsonl").write_text("")
    (folder / "bc.jsonl").write_text('{"cut')
    trace = read_trace(folder)
    assert [int(r.tokens[0]) for r in trace.requests] == [0, 1, 2]
    cut = "bc.jsonl: the last line is cut and was skipped"
    assert (trace.name, trace.notes) == ("logs", (cut, "c.jsonl: the file is empty"))
    (folder / "d.json").write_text(json.dumps([{"conversations": CONVERSATION}]))
    with pytest.raises(TraceError, match=r"a.jsonl is marconi\): d.json is chat"):
        read_trace(folder)


def test_conversations_without_a_time_follow_one_another_over_files(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(lines(*[{"conversations": CONVERSATION}] * 2))
    assert [r.ts for r in read_trace(tmp_path).requests] == [0.0, 1.0, 2.0, 3.0]


def test_a_cut_last_line_is_skipped_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(lines(*ROWS) + '{"input_tokens": [1, 2')
    assert starts(path) == [0, 1, 2]
    assert read_trace(path).notes == ("t.jsonl: the last line is cut and was skipped",)
    path.write_text(lines(ROWS[0], '{"input_tokens": [1, 2', ROWS[1], "[1]", {**ROW, "ts": "soon"}, ROWS[2]))
    with pytest.raises(TraceError, match=r"t.jsonl:2: not a line of JSON"):
        read_trace(path)
    assert starts(path, skip_bad=True) == [0, 1, 2]
    (note,) = read_trace(path, skip_bad=True).notes
    assert note.startswith("3 x: bad rows were skipped, the first is t.jsonl:2: not a line of JSON")
    path.write_text(lines("{", "{"))
    with pytest.raises(TraceError, match=r"holds no request .*bad rows were skipped"):
        read_trace(path, skip_bad=True)


def tokenizer(folder: Path) -> None:
    words = {"hello": 0, "there": 1, "hi": 2, "?": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))


def test_half_a_character_is_text(tmp_path: Path) -> None:
    """Logs that are cut hold halves of emoji, which JSON can say and UTF-8 cannot."""
    tokenizer(tmp_path)
    path = tmp_path / "t.log"
    path.write_text(lines({"messages": [{"role": "user\ud83d", "content": "hello \ud83d there"}]}))
    for chosen in (None, tmp_path):
        assert read_trace(path, tokenizer=chosen).requests[0].n_input > 2


def test_a_tokenizer_counts_real_tokens(tmp_path: Path) -> None:
    tokenizer(tmp_path)
    path = tmp_path / "t.log"
    path.write_text(lines(finished(1, [], text="hello there hello")))
    trace = read_trace(path, tokenizer=tmp_path)
    assert trace.requests[0].input_tokens.tolist() == [0, 1, 0]
    assert trace.notes == ()
    assert "token counts are estimates" in read_trace(path).notes[0]
    path.write_text(lines({"conversations": CONVERSATION}))
    header = 2  # tokens that stand for the template around a message
    assert read_trace(path, tokenizer=tmp_path / "tokenizer.json").requests[0].n_input == header + 2 + header
    path.write_text(lines(ROW))
    assert "the tokenizer had nothing to do" in read_trace(path, tokenizer=tmp_path).notes[0]
    with pytest.raises(TraceError, match=r"model folder with a tokenizer.json"):
        read_trace(path, tokenizer=tmp_path / "missing")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TraceError, match=r"not a tokenizer.json that can be read"):
        read_trace(path, tokenizer=tmp_path)


def test_a_file_name_does_not_command_the_terminal(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Names are bytes: this one clears the screen, forges a line, and is no UTF-8."""
    path = tmp_path / os.fsdecode(b"a\x1b[2J\nerror: forged \xff.jsonl")
    arguments = ["--policy", "lru", "--capacity-gb", "8", "--jobs", "1", "--no-ceilings"]
    path.write_text('{"ts": 0, "input_ids": [1, 2, 3], "output_ids": [4]}\n')
    assert cli.main([str(path), *arguments]) == 0
    path.write_text("no row")
    assert cli.main([str(path), *arguments]) == 2
    with pytest.raises(ConfigError) as refused:
        replay(path)
    said = b"".join(capfdbinary.readouterr()) + str(refused.value).encode()
    assert b"\x1b[2J" not in said
    assert b"\nerror: forged" not in said
    assert said.count(b"a\\x1b[2J\\nerror: forged \\udcff") >= 3
