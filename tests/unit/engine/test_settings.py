"""Where settings come from: files of SGLang's and its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hybrid import launch_server
from sglang_hybrid.core.process import free_port
from sglang_hybrid.engine.launch import flags
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
