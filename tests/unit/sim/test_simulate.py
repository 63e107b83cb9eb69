"""The command from end to end: grid, table, JSON, plot, and what a user can get wrong."""

import builtins
import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import preset
from sglang_hybrid.prefix.request_log import RecordedDecisions, RequestLog
from sglang_hybrid.sim import cli, grid, plots
from sglang_hybrid.sim.metrics import Outcome
from sglang_hybrid.sim.readers import marconi, read_trace
from sglang_hybrid.sim.report import Report
from sglang_hybrid.sim.workloads import generate

SMALL = "workload:sharegpt?seed=1&sessions=6"


def outcome(policy: str, rate: float, gb: float = 1.0) -> Outcome:
    return Outcome("t", "m", policy, gb, {"token_hit_rate": rate})


def test_the_command_compares_policies_and_names_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, png = tmp_path / "deep" / "o.json", tmp_path / "o.png"
    argv = [SMALL, "--policy", "lru,forecast", "--capacity-gb", "0.2,1", "--jobs", "1", "--context-tokens", "8192"]
    assert cli.main([*argv, "--json", str(out), "--plot", str(png)]) == 0
    text = capsys.readouterr().out
    assert "Best policy: " in text
    assert "qwen3.5-35b-a3b (the default; --model names yours)" in text
    report = json.loads(out.read_text())
    assert report["schema"] == "sglang-hybrid/simulate/1"
    assert report["models"][0]["context_tokens"] == 8192
    rows = report["cells"]
    assert [(r["capacity_gb"], r["policy"]) for r in rows] == [
        (gb, p) for gb in (0.2, 1.0) for p in ("lru", "forecast", "clairvoyant", "bound", "unbounded")
    ]
    for row in rows:
        if "peak_gb" in row:
            assert (row["over_capacity_requests"], row["false_hits"]) == (0, 0)
            assert row["peak_gb"] <= row["capacity_gb"]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_file_and_a_generator_give_the_same_hits(tmp_path: Path) -> None:
    marconi.write(generate("sharegpt", 1, sessions=6), tmp_path / "t.jsonl")
    cells = [
        grid.cells([grid.Source(text)], [preset("marconi-7b")], ["lru"], [0.5])[0]
        for text in (SMALL, str(tmp_path / "t.jsonl"))
    ]
    a, b = (grid.run_cell(c) for c in cells)
    assert a.fields["hit_tokens"] == b.fields["hit_tokens"] > 0


def test_what_clients_asked_again_is_served_as_by_a_server(tmp_path: Path) -> None:
    prompt = list(range(400))
    rows = [{"ts": float(at), "input_ids": prompt, "output_ids": [500 + at, 600 + at]} for at in range(2)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    marconi.write(read_trace(tmp_path / "asked.jsonl"), tmp_path / "paper.jsonl")

    def hits(file: str, policy: str, strategy: str = "auto", model: str = "marconi-7b") -> int:
        sources = [grid.Source(str(tmp_path / file))]
        cell = grid.cells(sources, [preset(model)], [policy], [9], strategy=strategy)[0]
        found: int = grid.run_cell(cell).fields["hit_tokens"]
        return found

    for policy in ("lru", "marconi", "forecast"):
        assert hits("asked.jsonl", policy) == hits("paper.jsonl", policy, "extra_buffer") == 384
        assert hits("asked.jsonl", policy, "no_buffer") == (0 if policy == "lru" else 399), "as SGLang's own: never"
        assert hits("paper.jsonl", policy) == hits("asked.jsonl", policy, "paper") == 0, "no states at ends of prompts"
    assert hits("asked.jsonl", "forecast", model="lfm2-1.2b") == 399, "SGLang has no extra_buffer for it"
    assert hits("asked.jsonl", "forecast", "no_buffer", "nemotron-h-8b") == 384, "every 128 tokens"
    assert hits("asked.jsonl", "forecast", "no_buffer", "falcon-mamba-7b") == 0, "one state, behind the prompt"
    with pytest.raises(ConfigError, match="leave out --strategy"):
        hits("asked.jsonl", "forecast", "extra_buffer", "lfm2-1.2b")


@pytest.mark.parametrize(("model", "gb"), [("qwen3.5-35b-a3b", 0.5), ("mamba-codestral-7b", 9), ("llama-3.1-8b", 9)])
def test_a_server_with_two_pools_is_simulated_where_it_can_be(
    model: str, gb: float, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [SMALL, "--policy", "pools:forecast,lru", "--jobs", "1", "--no-ceilings", "--model", model]
    assert cli.main([*argv, "--capacity-gb", str(gb)]) == 2
    assert "leave out pools:" in capsys.readouterr().err
    assert cli.main([*argv[:-1], "qwen3.5-35b-a3b", "--capacity-gb", "9"]) == 0
    assert "anywhere, none for the end of a prompt" in capsys.readouterr().out


def test_the_knee_is_of_what_a_server_can_get_if_memory_gives_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"ts": float(at), "input_ids": list(range(120)), "output_ids": [500 + at]} for at in range(4)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main([str(tmp_path / "asked.jsonl"), "--capacity-gb", "3,9", "--jobs", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Memory for all that is saved gives 40.0 % with lru, marconi and forecast; 3 GB is enough for 95 %" in text
    assert "extra_buffer, a prefix is reused to multiples of 64 tokens" in text


def test_processes_give_what_one_process_gives() -> None:
    cells = grid.cells([grid.Source(SMALL)], [preset("marconi-7b")], ["lru", "superseded", "bound"], [0.3, 1.0])

    def rates(jobs: int) -> dict[int, float]:
        return {i: o.token_hit_rate for i, o in grid.run(cells, jobs)}

    alone = rates(1)
    assert rates(2) == alone
    assert len(alone) == 6


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name a trace file or a workload"),
        (["missing.jsonl"], "no such trace file"),
        ([SMALL, "--policy", "belady"], "unknown policy"),
        ([SMALL, "--policy", ""], "name at least one policy"),
        ([SMALL, "--policy", " , "], "name at least one policy"),
        ([SMALL, "--json", "/proc/x.json"], "cannot be written"),
        ([SMALL, "--plot", "/proc/x.png"], "cannot be written"),
        ([SMALL, "--plot", "x.gif1"], "a plot is one of"),
        ([SMALL, "--json", "/"], "cannot be written"),
        ([SMALL, "--model", "qwen3-next-80b"], "did you mean qwen3-next-80b-a3b"),
        (["no.log", "--tokenizer", "/proc/none"], "no such trace file"),
        ([SMALL, "--policy", "lru,belady", "--jobs", "2"], "unknown policy"),
        ([SMALL, "--capacity-gb", "0"], "positive number of GB, got 0"),
        ([SMALL, "--capacity-gb", "1,-2"], "positive number of GB, got -2"),
        ([SMALL, "--capacity-gb", "big"], "must be a number"),
        ([SMALL, "--capacity-gb", "nan"], "positive number of GB"),
        ([SMALL, "--capacity-gb", ","], "at least one policy and one capacity"),
        ([SMALL, "--jobs", "0"], "at least one process"),
        ([SMALL, "--tflops", "0"], "--tflops must be positive"),
        ([SMALL, "--ttft-overhead-ms", "-1"], "overhead must be >= 0"),
        (["--workload", "chess"], "unknown workload"),
        ([SMALL, "--model", "gpt-17"], "gpt-17"),
        ([SMALL, "--context-tokens", "-1"], "a context holds tokens, 0 stands for unknown: -1"),
    ],
)
def test_what_a_user_gets_wrong(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*argv, *(["--jobs", "1"] if "--jobs" not in argv else [])]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert message in error


def test_an_empty_and_a_corrupt_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, corrupt = tmp_path / "empty.jsonl", tmp_path / "corrupt.jsonl"
    empty.write_text("")
    marconi.write(generate("sharegpt", 1, sessions=2), corrupt)
    corrupt.write_text(corrupt.read_text()[:-40])
    assert cli.main([str(empty)]) == 2
    assert "the trace file is empty" in capsys.readouterr().err
    corrupt.write_text(corrupt.read_text() + "\n")
    assert cli.main([str(corrupt)]) == 2
    assert f"corrupt.jsonl:{len(generate('sharegpt', 1, sessions=2))}: " in capsys.readouterr().err


def test_the_table_prints_ceilings_without_costs() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    Report((outcome("lru", 0.5), outcome("bound", 0.75))).print(console)
    assert "75.0" in console.export_text()


def test_a_plot_without_matplotlib_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'sglang-hybrid\[plot\]'"):
        plots.plot_hit_rates(Report((outcome("lru", 0.5),)), tmp_path / "x.png")


def test_a_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one outcome"):
        plots.plot_hit_rates(Report(()), tmp_path / "x.png")


class Stdin:
    """Standard input of these bytes."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


def test_standard_input_is_a_trace_for_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marconi.write(generate("sharegpt", 1, sessions=3), tmp_path / "t.jsonl")
    content = gzip.compress((tmp_path / "t.jsonl").read_bytes())
    monkeypatch.setattr("sys.stdin", Stdin(content))
    assert cli.main(["-", "--policy", "lru,forecast", "--capacity-gb", "1", "--jobs", "2"]) == 0
    assert "stdin on qwen3.5-35b-a3b" in capsys.readouterr().out


def test_outputs_are_refused_before_the_work_and_notes_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "o.json"
    marconi.write(generate("sharegpt", 1, sessions=3), trace)
    trace.write_text(trace.read_text() + '{"cut": ')
    argv = [str(trace), "--policy", "lru", "--capacity-gb", "1", "--jobs", "1", "--json", str(out)]
    assert cli.main(argv) == 0
    assert "note: t: t.jsonl: the last line is cut and was skipped" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["notes"] == ["t: t.jsonl: the last line is cut and was skipped"]
    assert report["answers"][0].startswith(
        "t on qwen3.5-35b-a3b: Endless memory, with a state at every position, would serve "
    )

    def work(*_: object) -> list[Outcome]:
        raise AssertionError("worked although the output cannot be written")

    monkeypatch.setattr(cli, "_run", work)
    for option in ("--json", "--plot"):
        assert cli.main([*argv[:-2], option, "/proc/x.png"]) == 2
    assert report == json.loads(out.read_text())


def test_the_model_of_a_request_log_is_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RequestLog(tmp_path / "requests.log", 1 << 20)
    decisions = RecordedDecisions(log, preset("zamba2-7b"), "lru")
    request = decisions.arrive("r", np.arange(9, dtype=np.int32), 0.0, 0, 0)
    decisions.finish(request, np.arange(11, dtype=np.int32), 1.0, 0)
    log.close()
    argv = [str(tmp_path / "requests.log"), "--policy", "lru", "--capacity-gb", "1", "--jobs", "1"]
    assert cli.main(argv) == 0
    assert "model: zamba2-7b (of the request log)" in capsys.readouterr().out
    assert cli.main([*argv, "--model", "Qwen/Qwen3.5-27B"]) == 0
    assert "model: qwen3.5-27b (--model)" in capsys.readouterr().out


def test_what_the_server_of_a_log_had_cached_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RequestLog(tmp_path / "requests.log", 1 << 20)
    decisions = RecordedDecisions(log, preset("zamba2-7b"), "lru")
    for number, cached in enumerate((0, 6)):
        request = decisions.arrive(f"r{number}", np.arange(12, dtype=np.int32), float(number), cached, cached)
        decisions.finish(request, np.arange(12, dtype=np.int32), float(number), 12)
    log.close()
    assert cli.main([str(tmp_path / "requests.log"), "--policy", "lru", "--capacity-gb", "1", "--jobs", "1"]) == 0
    assert "its server had 25.0 % of the input tokens cached." in capsys.readouterr().out
