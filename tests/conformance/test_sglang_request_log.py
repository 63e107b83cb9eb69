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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `server.out`, and the folders that are the targets of `full` and `lower` levels."""
    made = tmp_path_factory.mktemp("logs")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(made / "full"), str(made / "lower")],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    (made / "server.out").write_text(done.stdout + done.stderr)
    return made


def test_requests_come_back_as_they_were_logged(folder: Path) -> None:
    stdout = folder / "server.out"
    assert stdout.read_text().count("request.finished") == 2
    assert '] {"timestamp": "' in stdout.read_text()
    for source in (stdout, folder / "full"):
        first, second = read_trace(source).requests
        assert (first.session, first.boundaries, first.tokens.tolist()) == ("first", (3,), [11, 12, 13, 14, 15, 16])
        assert (second.session, second.n_input) == ("second", len(tokenize("hello there")))
        assert second.output_tokens.tolist() == tokenize("so it is").tolist()
        assert second.tokens[0] != tokenize("hello there")[0]  # a namespace of its own


def test_a_lower_level_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(TraceError, match="log with --log-requests-level 3"):
        read_trace(folder / "lower")
