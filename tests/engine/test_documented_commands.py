"""README's commands, run as they are printed: the quickstart, then each block of the shell beside its server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sglang_hybrid.core.process import free_port
from tests.engine.support import PATIENCE_S

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```sh(.*)\n((?:.*\n)*?)```$", (ROOT / "README.md").read_text(), re.MULTILINE)
RUN = [text for mark, text in BLOCKS if not mark]

SAYS = {
    "doctor --url": ["hit rate", "of the missed tokens", "states"],
    "bench_serving": ["Cache hit rate:", "never_seen:"],
    "curl": ['"miss_tokens"', "The gate code of the Tolvik mill is 4821."],
    "replay models/quickstart-requests.log  ": ["0 decided differently"],
    "spec Qwen": ["states"],
}
"""What the output of a block with such a command must hold."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A checkout as the quickstart leaves it, with its server running, and the server's port."""
    here, port = tmp_path_factory.mktemp("checkout"), free_port()
    (here / ".venv").symlink_to(sys.prefix)
    mark = f"documented commands in {here}"
    command = [sys.executable, "-m", "sglang_hybrid.demo.quickstart", "--port", str(port)]
    environment = {**os.environ, "SGLANG_HYBRID_TEST": mark}
    log = here / "quickstart.log"
    try:
        with log.open("w") as sink:  # a pipe would stay open: the server keeps running
            done = subprocess.run(command, cwd=here, stdout=sink, stderr=sink, timeout=PATIENCE_S, env=environment)
        assert done.returncode == 0, log.read_text()
        yield here, port
        stop = re.search(r"stop it: kill (\d+)", log.read_text())
        assert stop is not None
        os.kill(int(stop[1]), signal.SIGTERM)
        left = [
            p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("SGLANG_HYBRID_TEST") == mark
        ]
        _, alive = psutil.wait_procs(left, timeout=PATIENCE_S)
        assert alive == []
    finally:
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("SGLANG_HYBRID_TEST") == mark:
                process.kill()


@pytest.mark.parametrize("text", RUN, ids=lambda text: text.splitlines()[1].split(" -")[0])
def test_a_block_of_the_readme_runs_as_printed(folder: tuple[Path, int], text: str) -> None:
    here, port = folder
    script = text.replace("30000", str(port))  # which somebody else may have
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for command, said in SAYS.items():
        if command in text:
            assert [word for word in said if word not in done.stdout] == [], done.stdout


def test_what_is_not_run_here_is_marked_with_what_it_needs() -> None:
    assert {mark.strip() for mark, _ in BLOCKS} == {"", "cluster", "gpu", "quickstart"}
    assert len(RUN) == 2
    assert all(command in "".join(RUN) for command in SAYS)
