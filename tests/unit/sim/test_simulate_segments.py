"""`simulate --segments-gb` from end to end: rows, words, JSON, and what a user can get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_hybrid.core.spec import preset
from sglang_hybrid.prefix.request_log import RecordedDecisions, RequestLog
from sglang_hybrid.sim import cli, grid, replay_cli
from sglang_hybrid.sim.metrics import Outcome
from sglang_hybrid.sim.plots import draw
from sglang_hybrid.sim.report import Report
from sglang_hybrid.sim.segments.cache import Memory
from sglang_hybrid.sim.segments.words import words

SMALL = "workload:documents?seed=3&requests=40&documents=30&per_request=4&document_tokens=400"
PLAIN = "workload:sharegpt?seed=1&sessions=4"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main([*argv, "--jobs", "1"]) == 0
    return capsys.readouterr().out


def test_rows_words_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o.json"
    text = run(
        capsys, SMALL, "--policy", "lru,forecast", "--capacity-gb", "1,2,4", "--segments-gb", "1", "--json", str(out)
    )
    assert "at 1 GB there is no room for 1 GB of segments" in text
    report = json.loads(out.read_text())
    rows = {(row["capacity_gb"], row["policy"]): row for row in report["cells"]}
    assert [policy for gb, policy in rows if gb == 4.0] == [
        "lru", "forecast", "forecast+segments", "clairvoyant+segments", "unbounded+segments", *grid.CEILINGS,
    ]  # fmt: skip
    assert all("segments" not in policy for gb, policy in rows if gb == 1.0)
    for gb in (2.0, 4.0):
        mine, plain, top = (rows[gb, name] for name in ("forecast+segments", "forecast", "unbounded+segments"))
        assert plain["flop_hit_rate"] < mine["flop_hit_rate"] < top["flop_hit_rate"]
        assert mine["prefix_tokens"] + mine["segment_tokens"] == mine["hit_tokens"]
        assert (mine["over_capacity_requests"], mine["false_hits"]) == (0, 0)
        assert mine["peak_gb"] <= gb
        assert 0 < mine["segments_kept"] < top["segments_kept"] < mine["segments_marked"] == 4.0
        assert (mine["segments_gb"], mine["segment_dtype"], mine["seam_tokens"]) == (1.0, "bfloat16", 8)
    assert [said.split(": ", 1)[1][:9] for said in report["answers"]] == ["Endless m", "Segments:"]
    assert report["answers"][1].split(": ", 1)[1] in " ".join(text.split())


def test_memory_dtype_and_seams_are_those_that_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(*flags: str) -> dict[str, Any]:
        out = tmp_path / "o.json"
        argv = [SMALL, "--policy", "recency", "--capacity-gb", "2", "--segments-gb", "0.5", "--no-ceilings"]
        run(capsys, *argv, "--json", str(out), *flags)
        (_, found) = json.loads(out.read_text())["cells"]
        assert found["policy"] == "recency+segments"
        return dict(found)

    plain, small, wide = row(), row("--segment-dtype", "int8"), row("--seam-tokens", "64")
    assert small["segments_kept"] > plain["segments_kept"]
    assert wide["segment_tokens"] < plain["segment_tokens"]
    assert row("--pass-tokens", "100")["segment_tokens"] == 0


def test_traces_without_marks_have_no_such_rows(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, PLAIN, SMALL, "--policy", "lru", "--capacity-gb", "2", "--segments-gb", "1", "--no-ceilings")
    assert "sharegpt,sessions=4#1: no request marks a segment, so rows of segments are left out" in text
    assert text.count("lru+segments") == 1
    text = run(capsys, SMALL, "--policy", "lru", "--capacity-gb", "2", "--no-ceilings")
    assert "requests mark segments; --segments-gb 4 simulates keeping them" in " ".join(text.split())
    assert "+segments" not in text


def test_a_log_of_a_server_is_simulated_with_segments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokens are hashes of everything before them, so equal documents differ in them."""
    path = tmp_path / "requests.log"
    log = RequestLog(path, 1 << 20)
    decisions = RecordedDecisions(log, preset("qwen3.5-35b-a3b"), "forecast", grid=1)
    documents = [np.arange(1000 * n, 1000 * n + 300, dtype=np.int32) for n in range(3)]
    for number, order in enumerate(((0, 1, 2), (2, 0, 1), (1, 2, 0))):
        prompt = np.concatenate([*(documents[n] for n in order), np.arange(9, dtype=np.int32)])
        request = decisions.arrive(f"r{number}", prompt, float(number), 0, 0)
        decisions.marked(request, [(300 * at, 300 * at + 300, bytes([n])) for at, n in enumerate(order)])
        decisions.finish(request, np.append(prompt, np.int32(5)), number + 0.5, 0)
        decisions.computed(request.id)
    log.close()
    model = ["--model", "qwen3.5-35b-a3b", "--capacity-gb", "2", "--segments-gb", "1", "--policy", "forecast"]
    text = " ".join(run(capsys, str(path), *model, "--no-ceilings").split())
    assert "3 of 3 requests mark 3.0 each" in text
    assert "2.0 of 3.0 segments a request were kept" in text
    assert replay_cli.main([str(path), "--states", "50", "--kv-tokens", "9000"]) == 0
    assert "3 of them marked segments, simulated as plain text" in capsys.readouterr().out
    assert cli.main([str(path), *model[2:], "--jobs", "1"]) == 2
    assert "name it with --model for segments: qwen3.5-35b-a3b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--segments-gb", "0"], "--segments-gb must be a positive number of GB: 0"),
        (["--segments-gb", "nan"], "--segments-gb must be a positive number of GB: nan"),
        (["--segments-gb", "2"], "segments take their memory from --capacity-gb, give more than: 2"),
        (["--segments-gb", "0.05"], "raise --segments-gb: 0.05"),
        (["--segments-gb", "1", "--transitions-kept", "1.5"], "--transitions-kept is a share between 0 and 1: 1.5"),
        (["--segments-gb", "1", "--transitions-kept", "nan"], "--transitions-kept is a share between 0 and 1: nan"),
        (["--segments-gb", "1", "--seam-tokens", "-1"], "seam tokens must be between 0 and"),
        (["--segments-gb", "1", "--pass-tokens", "0"], "--pass-tokens must be positive: 0"),
        (["--segments-gb", "1", "--model", "llama-3.1-8b"], "Kimi delta attention or Mamba-2"),
        (["--segments-gb", "1", "--policy", "belady+segments"], "unknown policy"),
        (["--policy", "lru+segments"], "say how much memory segments have, add --segments-gb: lru+segments"),
    ],
)
def test_what_a_user_gets_wrong(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([SMALL, "--capacity-gb", "2", "--jobs", "1", *flags]) == 2
    assert message in capsys.readouterr().err


def outcome(policy: str, rate: float, gb: float = 8.0, kept: float = 3.1) -> Outcome:
    marks = {"marking_requests": 6, "requests": 9, "segments_marked": 8.0, "seam_tokens": 8, "segments_gb": 2.0}
    fields = marks | {"segments_kept": kept} if policy.endswith("+segments") else {}
    return Outcome("t", "m", policy, gb, {"token_hit_rate": rate, "flop_hit_rate": rate, **fields})


def test_the_answer_in_words() -> None:
    rows = [outcome("forecast", 0.2), outcome("forecast+segments", 0.512), outcome("unbounded+segments", 0.7, kept=7.0)]
    assert words(rows) == (
        "Segments: 6 of 9 requests mark 8.0 each, reused with seams of 8 tokens. At 8 GB, 2 of them for segments, "
        "forecast would have saved 51.2 % of the prefill FLOPs instead of 20.0 %: 3.1 of 8.0 segments a request were "
        "kept. With endless memory 70.0 % are saved, and 7.0 of 8.0 segments a request are kept. An answer over reused "
        "segments is an approximation (docs/segments.md)."
    )
    assert "saved 20.0 % of the prefill FLOPs, no more than the 20.0 % without." in words(
        [outcome("forecast", 0.2), outcome("forecast+segments", 0.2)]
    )
    assert "forecast would have saved 51.2 % of the prefill FLOPs: 3.1" in words(rows[1:2])
    assert "At 16 GB, with segments evicted by knowledge of the future, 60.0 % are saved" in words(
        [*rows, outcome("clairvoyant+segments", 0.5), outcome("clairvoyant+segments", 0.6, 16.0)]
    )
    assert words(rows[:1]) == words(rows[2:]) == ""


def test_a_plot_draws_them_beside_the_others() -> None:
    rows = [outcome(name, rate) for name, rate in (("lru", 0.1), ("lru+segments", 0.3), ("unbounded+segments", 0.5))]
    (axis,) = draw(Report(tuple(rows))).axes
    styles = {line.get_label(): line.get_linestyle() for line in axis.get_lines()}
    assert styles == {"lru": "-", "lru+segments": "-", "unbounded+segments": ":"}
    assert "20.0 points more than LRU" in axis.get_title(loc="left").replace("\n", " ")


def test_a_cell_says_how_much_memory_segments_have() -> None:
    source = grid.Source(SMALL)
    (cell,) = grid.cells([source], [preset("qwen3.5-35b-a3b")], ["lru+segments"], [2.0], segments=Memory(10**9))
    assert grid.has_room(cell, source.load())
    assert not grid.has_room(cell, grid.Source(PLAIN).load())
    (small,) = grid.cells([source], [cell.model], ["lru+segments"], [1.0], segments=cell.segments)
    assert not grid.has_room(small, source.load())
    assert grid.is_ceiling("unbounded+segments")
    assert not grid.is_ceiling("lru+segments")
