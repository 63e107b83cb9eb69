"""The simulator reads what the installed SGLang logs, on stdout among other lines and in the folder of a target."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hybrid.sim.readers import read_trace
from sglang_hybrid.sim.readers.text import tokenize
from sglang_hybrid.sim.trace import TraceError

SCRIPT = Path(__file__).with_name("sglang_request_log.py")


def written(folder: Path, level: int) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(level)], capture_output=True, text=True, check=True, timeout=600
    )
    return done.stdout + done.stderr


def test_requests_come_back_as_they_were_logged(tmp_path: Path) -> None:
    stdout = tmp_path / "server.out"
    stdout.write_text(written(tmp_path / "target", 3))
    assert stdout.read_text().count("request.finished") == 2
    assert '] {"timestamp": "' in stdout.read_text()
    for source in (stdout, tmp_path / "target"):
        first, second = read_trace(source).requests
        assert (first.session, first.boundaries, first.tokens.tolist()) == ("first", (3,), [11, 12, 13, 14, 15, 16])
        assert (second.session, second.n_input) == ("second", len(tokenize("hello there")))
        assert second.output_tokens.tolist() == tokenize("so it is").tolist()
        assert second.tokens[0] != tokenize("hello there")[0]  # a namespace of its own


def test_a_lower_level_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path, 1)
    with pytest.raises(TraceError, match="log with --log-requests-level 3"):
        read_trace(tmp_path)
