"""Where settings come from: files, abbreviated flags, the environment of an earlier start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_hybrid import launch_server
from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.process import free_port
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import early, flags, preparation, settings, slots
from tests.engine.configs import QWEN3_NEXT, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", QWEN3_NEXT)


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *argv: str) -> str:
    """What the launcher says as it ends with status 2."""
    assert launch_server.main(["--port", str(free_port()), "--model-path", str(folder), *argv]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (("--config={}",), "written in two words: --config "),
        (("--conf", "{}"), "written in two words: --config "),
        (("--config", "{}", "--config", "{}"), "Multiple config files"),
    ],
)
def test_a_file_of_sglangs_settings_that_it_would_not_read(
    capsys: pytest.CaptureFixture[str], folder: Path, flag: tuple[str, ...], message: str
) -> None:
    file = folder.parent / "settings.yaml"
    file.write_text("port: 7\n")
    line = [word.format(file) for word in flag]
    assert message in refused(capsys, folder, *line)


def test_a_file_of_sglangs_settings(folder: Path) -> None:
    file = folder.parent / "settings.yaml"
    file.write_text("max-total-tokens: 4096\nlora-target-modules: [o_proj]\n")
    line = ["--model-path", str(folder), "--config", str(file)]
    assert (flags.parse_engine(line).max_total_tokens, flags.given(line) >= {"max_total_tokens"}) == (4096, True)
    assert flags.parse_engine([*line, "--max-total-tokens", "2048"]).max_total_tokens == 2048


@pytest.mark.skipif(not compat.at_least("0.5.21"), reason="events of states are refused with this SGLang")
def test_a_channel_in_a_file_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("kv-events-config: {publisher: zmq}\n")
    settings.check_files(HybridConfig(state_events="published"), early.read(["--config", str(file)]))


def test_abbreviated_ranks(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert "each rank takes one" in refused(capsys, folder, "--tensor-parallel", "64")


def test_the_next_start_of_a_process_chooses_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine after another one: what the launcher set for the first is not what the user said to the second."""
    monkeypatch.setattr(
        os, "environ", {**os.environ, "SGLANG_USE_CPU_ENGINE": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "1"}
    )
    names = "SGLANG_MAMBA_CONV_DTYPE", slots.UNLOCK, "OMP_NUM_THREADS"
    for name in names:
        os.environ.pop(name, None)
    chosen = []
    for dtype, config in (
        ("bfloat16", HybridConfig(cpu_threads=3)),
        ("float32", HybridConfig(cpu_threads=2, policy="lru")),
    ):
        rest = ["--model-path", str(folder), "--dtype", dtype]
        preparation.enter(rest, config, early.read(rest))
        preparation.complete(flags.parse_engine(rest), rest, config)
        chosen.append(tuple(map(os.environ.get, names)))
        assert os.environ["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] == "1", "the user's own stays"
        assert os.environ["SGLANG_USE_CPU_ENGINE"] == "1", "there is nothing else here"
    assert chosen == [("bfloat16", "1", "3"), ("float32", None, "2")]
