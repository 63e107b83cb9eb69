"""The commands of a day on a GPU: what they unpack, what they conclude, and that one failure stops nothing else."""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as day
from benchmarks.gpu import kit, load, prepare, servers, summary
from benchmarks.gpu.parts import PARTS, Part
from sglang_hybrid.core.errors import ConfigError


def a_kit(folder: Path) -> Path:
    folder.mkdir()
    with tarfile.open(folder / "packages.tar.xz", "w:xz") as archive:
        entry = tarfile.TarInfo("engine/__init__.py")
        entry.size = len(b"VERSION = 1\n")
        archive.addfile(entry, io.BytesIO(b"VERSION = 1\n"))
    with zipfile.ZipFile(folder / "ours-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("ours/__init__.py", "")
        wheel.writestr("ours-1.dist-info/entry_points.txt", "[engine.plugins]\nours = ours\n")
    (folder / "kit.json").write_text('{"flags": ["--attention-backend", "triton"], "environment": {"A": "1"}}')
    return folder


def test_a_kit_is_unpacked_once(tmp_path: Path) -> None:
    folder = a_kit(tmp_path / "kit")
    packages = kit.unpack(folder, tmp_path / "work")
    assert packages.site is not None
    assert (packages.site / "engine/__init__.py").read_text() == "VERSION = 1\n"
    assert (packages.site / "ours-1.dist-info/entry_points.txt").is_file(), "plug-ins are found by entry points"
    assert packages.flags == ["--attention-backend", "triton"]
    assert packages.environment["A"] == "1"
    assert packages.environment["PYTHONPATH"].split(":")[0] == str(packages.site)
    (packages.site / "engine/__init__.py").write_text("VERSION = 2\n")
    kit.unpack(folder, tmp_path / "work")
    assert (packages.site / "engine/__init__.py").read_text() == "VERSION = 2\n"


@pytest.mark.parametrize("flags", [None, '{"a": 1}', '["--flag"]', '{"flags": [1]}', '{"flags": "--flag"}'])
def test_what_is_no_kit_is_refused(tmp_path: Path, flags: str | None) -> None:
    folder = tmp_path / "kit"
    folder.mkdir()
    if flags is not None:
        a_kit(tmp_path / "other").rename(folder.with_name("full"))
        folder = folder.with_name("full")
        (folder / "kit.json").write_text(flags)
    with pytest.raises(ConfigError, match="name another folder" if flags is None else "with strings"):
        kit.unpack(folder, tmp_path / "work")


def test_a_wheel_takes_the_place_of_its_package(tmp_path: Path) -> None:
    folder = a_kit(tmp_path / "kit")
    wheel = tmp_path / "engine-2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("engine/new.py", "VERSION = 2\n")
        opened.writestr("engine/large/one.so", "x")
    prepare.repack([folder / "packages.tar.xz"], [wheel], ["engine/large"], tmp_path / "packages.tar.xz")
    with tarfile.open(tmp_path / "packages.tar.xz") as packed:
        names = {str(Path(member.name)) for member in packed.getmembers() if member.isfile()}
    assert names == {"engine/new.py"}


def answer(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {"ids": ids, "logprobs": logprobs}


def test_log_probabilities_are_compared_up_to_the_first_other_token() -> None:
    one, other = answer([5, 6, 7], [-1.0, -2.0, -3.0]), answer([5, 8, 7], [-1.5, -2.0, -9.0])
    found = load.distance([one], [other])
    assert found == {"mean": 0.25, "p95": 0.5, "max": 0.5, "answers_differ": 1}
    assert load.distance([one], [one])["max"] == 0.0


def equality(hit: float, noise: float, tokens: int = 9) -> dict[str, Any]:
    return {
        "equality": {
            "hit_tokens": tokens, "hit_beside_cold": {"p95": hit}, "cold_beside_cold_in_a_batch": {"p95": noise},
        }
    }  # fmt: skip


def composed(marked: int, unmarked: int) -> dict[str, Any]:
    arms = {"marked": (marked, 5), "unmarked": (unmarked, 0)}
    return {
        "composed": {
            name: {"right": right, "questions": 12, "segment_tokens": tokens} for name, (right, tokens) in arms.items()
        }
    }


def contention(rate: float) -> dict[str, Any]:
    later = {"ttft_p95_s": 0.4}
    return {"contention": {"hit_rate": rate, "ttft_p50_s": 0.2, "ttft_p95_s": 1.0, "later_turns": later}}


def test_a_model_is_declared_in_the_type_it_is_served_in(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32", "hidden_size": 8}')
    servers.declare(tmp_path, "bfloat16")
    assert json.loads((tmp_path / "config.json").read_text()) == {"dtype": "bfloat16", "hidden_size": 8}
    served = argparse.Namespace(rehearse=False, elastic=False)
    for name in ("ours, KDA", "ours, LFM2's fused prefill", "ours", "ours, reader"):
        flags = servers.common(served, servers.SERVERS[name])
        assert ("bfloat16" in flags) == (name != "ours, reader"), "the readers are served in SGLang's choice"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (equality(0.03, 0.01), "hits equal cold"),
        (equality(0.05, 0.01), "HITS DIFFER FROM COLD"),
        (equality(0.0, 0.0, tokens=0), "HITS DIFFER FROM COLD"),  # no hit proves nothing
        ({"error": "ServerDied: no\nlog"}, "FAILED: ServerDied: no"),
        ({"growth": {"finite": False}}, "NOT FINITE"),
        (composed(9, 8), "9 of 12 answers over segments right, 8 without (5 tokens reused)"),
        (contention(0.895), "agents hit 89.5 %, first token p50 200 ms, p95 1000, later turns 400"),
    ],
)
def test_a_verdict_says_what_is_proven(found: dict[str, Any], said: str) -> None:
    assert said in summary.verdict(found)


def test_synchronisations_are_counted_by_the_line_that_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, line = tmp_path / "log", "{}:{}: UserWarning: called a synchronizing CUDA operation (Triggered internally)\n"
    log.write_text(line.format("/x/sglang_hybrid/engine/a.py", 1))

    def run(*_: Any) -> dict[str, Any]:
        with log.open("a") as file:
            file.write(
                line.format("/x/sglang_hybrid/engine/a.py", 1) + 2 * line.format("/x/sglang/srt/b.py", 2) + "other\n"
            )
        return {"requests": 3}

    monkeypatch.setattr(load, "equality", lambda *_: {})
    monkeypatch.setattr(load, "conversations", run)
    found = servers.synchronisations(load.Client("http://127.0.0.1:1"), load.REHEARSAL, log)
    assert found == {"requests": 3, "all": 3, "ours": 1, "places": [("srt/b.py:2", 2), ("engine/a.py:1", 1)]}


WRITES = """
import json, os, pathlib
result = {"tools": {"racecheck": {"status": "clean"}}, "rounds": 3, "wrong_rounds": 0, "commit": "abc"}
pathlib.Path(os.environ["SGLANG_HYBRID_RESULTS"], "good.json").write_text(json.dumps(result))
"""


def test_one_part_that_fails_or_hangs_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {
        "bad": Part("fails", ("-c", "raise SystemExit(3)"), "bad.json"),
        "slow": Part("hangs", ("-c", "import time; time.sleep(60)"), "slow.json", limit_s=1),
        "good": Part("works", ("-c", WRITES), "good.json"),
    }
    for module in (day, summary):
        monkeypatch.setattr(module, "PARTS", parts)
    monkeypatch.setattr(summary, "_VERDICTS", dict.fromkeys(parts, summary.races))
    monkeypatch.setenv("OUT", str(tmp_path / "handed"))
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--out", str(tmp_path / "results"), "--part", *parts])
    assert day.main() == 1
    page = (tmp_path / "results/summary.md").read_text()
    assert capsys.readouterr().out.endswith(page + "\n")
    assert (tmp_path / "handed/summary.md").read_text() == page
    with tarfile.open(tmp_path / "handed/results.tar.xz") as archive:
        assert "results/good.json" in archive.getnames()
    for said in (
        "no figure here is a GPU's",
        "failed",
        "ran past its limit",
        "done",
        "- racecheck: clean",
        "- 0 of 3 rounds",
        "commit abc",
    ):
        assert said in page


def test_without_a_card_a_day_is_refused_and_says_what_can_be_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(day, "_card", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit) as ended:
        day.main()
    assert ended.value.code == 2
    assert "add --rehearse" in capsys.readouterr().err


def test_every_part_has_a_verdict_and_ends_in_nine_minutes() -> None:
    assert set(summary._VERDICTS) == set(PARTS)
    assert all(part.limit_s <= 540 for part in PARTS.values())
    assert summary.page(Path("nowhere"), {}, rehearsed=False).count("not run") == len(PARTS)


def test_a_server_whose_synchronisations_are_counted_finds_what_this_process_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/checkout/python")
    assert servers.counted({}) == f"{servers.SYNC_COUNTER}:/checkout/python"
    assert servers.counted({"PYTHONPATH": "/kit/site"}) == f"{servers.SYNC_COUNTER}:/kit/site"


def test_results_name_what_the_servers_ran_on() -> None:
    found = servers.about(kit.Packages())
    assert found["versions"]["sglang"]
    assert found["versions"]["torch"]
    assert found["commit"]
    assert found["card"]


def test_a_server_that_does_not_even_begin_is_reported_in_its_turn() -> None:
    def fails() -> servers.Server:
        raise OSError("no model was built")

    begun = servers.begun_now(fails)
    assert "no model was built" in servers.run(servers.Kind(), begun, argparse.Namespace(rehearse=True))["error"]
