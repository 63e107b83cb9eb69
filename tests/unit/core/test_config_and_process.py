"""Configuration that travels to child processes, and children that end with their parent."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_hybrid.core import process
from sglang_hybrid.core.config import HybridConfig, read_mapping
from sglang_hybrid.core.errors import ConfigError

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
import time; time.sleep(900)
"""
CHILD = """
from sglang_hybrid.core.process import die_with_parent
die_with_parent()
print("bound", flush=True)
import time; time.sleep(900)
"""


def test_a_child_dies_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, said = parent.stdout.readline().split()
        assert said == "bound"
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 600
        while _runs(int(pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _runs(int(pid))


def _runs(pid: int) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_spawned_child_without_its_announced_parent_exits_at_once() -> None:
    code = "from sglang_hybrid.core.process import die_with_announced_parent as d; d(); print('went on')"
    for parent, status in ((str(os.getpid()), 0), (str(os.getpid() + 1), 1)):
        environment = {**os.environ, "SGLANG_HYBRID_PARENT": parent}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert (done.returncode, "went on" in done.stdout) == (status, status == 0)


@pytest.mark.parametrize(("closed", "heard"), [("", 2), (">&-", 0), ("2>&-", 2), ("<&- >&- 2>&-", 0)])
def test_a_server_without_streams_writes_into_no_file_of_its_own(closed: str, heard: int, tmp_path: Path) -> None:
    code = (
        "import os, sys; from sglang_hybrid.core.process import take_care_of_files; take_care_of_files()\n"
        "made = open(sys.argv[1], 'w'); print('said'); print('said', file=sys.stderr)\n"
        "os.system('echo said; echo said >&2')\n"  # what libraries and children write
        "sys.stdout.isatty(), sys.stderr.isatty(), sys.stdin.read()"
    )
    file = tmp_path / "file"
    command = ["sh", "-c", f'umask 000; exec "$0" -c "$1" "$2" {closed}', sys.executable, code, str(file)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert file.read_text() == ""
    assert file.stat().st_mode & 0o777 == 0o644
    assert done.stdout == "said\n" * heard


@pytest.mark.parametrize("lost", ["pipe", "/dev/full"])
def test_a_log_that_cannot_be_written_is_told_of_once(lost: str) -> None:
    code = (
        "import logging, sys; from sglang_hybrid.core.process import take_care_of_files; take_care_of_files()\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "for _ in range(9): logging.error('a line that is long enough ' * 999)\n"
        "logging.error('two %s', 1, 2)\n"  # a mistake of the program's is told of as ever
        "import os; os._exit(7)\n"
    )
    if lost == "pipe":
        reads, writes = os.pipe()
        os.close(reads)
    else:
        writes = os.open(lost, os.O_WRONLY)
    done = subprocess.run([sys.executable, "-c", code], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert done.returncode == 7
    assert done.stderr.count("cannot be written and are lost") == 1
    assert done.stderr.count("Traceback") == 1
    assert "TypeError: not all arguments converted" in done.stderr


def test_configuration_survives_the_environment() -> None:
    config = HybridConfig(backend="stock", cpu_memory_gb=0.25, cpu_threads=3)
    assert HybridConfig.from_json(config.to_json()) == config
    assert config.cpu_memory_bytes == 250_000_000


def test_inline_configuration_may_be_json_or_yaml() -> None:
    assert read_mapping('{"cpu_threads": 1}') == read_mapping("{cpu_threads: 1}") == {"cpu_threads": 1}


@pytest.mark.parametrize("value", [True, "1", 1.5])
def test_a_whole_number_is_a_whole_number(value: object) -> None:
    with pytest.raises(ConfigError, match="cpu_threads must be of type int"):
        HybridConfig.from_mapping({"cpu_threads": value})


def test_the_end_of_the_imports_leaves_what_others_have_set_for_garbage() -> None:
    """SGLang's `--gc-threshold` is set between the two."""
    before = gc.get_threshold()
    try:
        process.collect_rarely()
        assert gc.get_threshold() != before
        process.collect_as_usual()
        assert gc.get_threshold() == before
        process.collect_rarely()
        gc.set_threshold(50_000, 20, 30)
        process.collect_as_usual()
        assert gc.get_threshold() == (50_000, 20, 30)
    finally:
        gc.set_threshold(*before)
