"""`sglang-hybrid spec`: costs, plans of memory, JSON, and what a user can get wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid import cli
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.planner import RATIOS, splits, static_split
from sglang_hybrid.core.spec import PRESETS, preset
from sglang_hybrid.demo import model
from sglang_hybrid.engine.launch import cpu_profile


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["spec", *arguments, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["models"]
    return dict(found)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_split_is_the_largest_that_fits(name: str, ratio: float) -> None:
    spec, budget = preset(name), 40 * 10**9
    split = static_split(spec, budget, ratio)
    slot, kv = spec.checkpoint_bytes, spec.kv_bytes_per_token
    padded = split.states + 1 if slot else 0
    assert split.used_bytes == padded * slot + split.tokens * kv <= budget
    if slot:
        assert padded * slot <= budget * ratio / (1 + ratio) < (padded + 1) * slot
    if kv:
        assert split.used_bytes + kv > budget


def test_a_budget_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"raise --memory-gb: 0\.1"):
        splits(preset("qwen3.5-35b-a3b"), 10**8)
    assert len(splits(preset("llama-3.1-8b"), 10**8)) == 1


def test_the_demo_costs_what_its_server_reports(tmp_path: Path) -> None:
    """512 bytes a token and 57.0 KiB a state, with the sizes that the launcher chooses; in a process as users start."""
    folder = str(model.build(tmp_path / "demo-gdn"))
    flags = ("--dtype", "float32", "--memory-gb", "4", "--cpu", "--json")
    command = [sys.executable, "-m", "sglang_hybrid", "spec", folder, "qwen3.5-35b-a3b", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    demo, large = json.loads(done.stdout)["models"]
    assert (demo["kv_bytes_per_token"], demo["checkpoint_bytes"]) == (512, 58_368)
    assert (demo["splits"][0]["tokens"], demo["splits"][0]["states"]) == (262_144, 512)
    spec = preset("qwen3.5-35b-a3b").with_dtypes(kv_dtype="float32", conv_dtype="float32")
    assert (large["splits"][0]["tokens"], large["splits"][0]["states"]) == cpu_profile.sizes(4 * 10**9, spec)


def test_dtypes_and_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    name = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    plain = shown(capsys, name)
    assert plain["splits"] == []
    assert shown(capsys, name, "--kv-dtype", "fp8_e4m3")["kv_bytes_per_token"] * 2 == plain["kv_bytes_per_token"]
    assert shown(capsys, name, "--state-dtype", "bfloat16")["checkpoint_bytes"] < plain["checkpoint_bytes"]
    assert shown(capsys, name, "--tp", "2")["checkpoint_bytes"] * 2 == plain["checkpoint_bytes"]
    split = shown(capsys, name, "--memory-gb", "40", "--ratio", "1")["splits"]
    assert [s["name"] for s in split] == ["ratio 1"]


def test_what_a_segment_holds(capsys: pytest.CaptureFixture[str]) -> None:
    segment = shown(capsys, "qwen3-next-80b-a3b")["segment"]
    assert (segment["tokens"], segment["kv_bytes"]) == (1024, 24 * 2**20)
    assert list(segment["state_bytes"]) == ["bfloat16", "int8", "float32"]
    assert segment["state_bytes"]["bfloat16"] == 77_276_160
    assert 2 * shown(capsys, "qwen3-next-80b-a3b", "--tp", "2")["segment"]["state_bytes"]["int8"] == 40_707_072
    assert shown(capsys, "llama-3.1-8b")["segment"] is None
    assert cli.main(["spec", "qwen3-next-80b-a3b", "llama-3.1-8b"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("segment")]
    assert line.split(" ", 3)[3].strip() == (
        "24.0 MiB of KV, and states of 37.7 to 73.7 MiB in bfloat16, 20.3 to 38.8 MiB in int8, 73.7 to 145.7 MiB in "
        "float32"
    )


def test_the_plan_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["spec", "qwen3.5-35b-a3b", "--memory-gb", "40"]) == 0
    text = capsys.readouterr().out
    split = static_split(preset("qwen3.5-35b-a3b"), 40 * 10**9, 0.9)
    assert f"ratio 0.9              {split.states:,} states and {split.tokens:,} tokens" in text
    assert cli.main(["spec", "llama-3.1-8b", "--memory-gb", "1"]) == 0
    assert "states and" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name at least one model"),
        (["qwen3-next-80b"], "did you mean qwen3-next-80b-a3b"),
        (["zamba2-7b", "--cpu"], "add --memory-gb"),
        (["zamba2-7b", "--ratio", "1"], "add --memory-gb"),
        (["zamba2-7b", "--memory-gb", "9", "--cpu", "--ratio", "1"], "leave out --cpu or --ratio"),
        (["zamba2-7b", "--memory-gb", "0"], "positive number of GB"),
        (["zamba2-7b", "--memory-gb", "nan"], "positive number of GB"),
        (["zamba2-7b", "--memory-gb", "9", "--ratio", "-1"], "more than 0: -1"),
        (["zamba2-7b", "--tp", "0"], "at least 1: 0"),
    ],
)
def test_what_a_user_gets_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["spec", *arguments]) == 2
    assert message in capsys.readouterr().err
