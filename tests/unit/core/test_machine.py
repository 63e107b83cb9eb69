"""What the machine gives to a process: control groups of either version, in containers and below units."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sglang_hybrid.core.machine import memory_bytes

GB = 10**9
HERE = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("own", "files", "least"),
    [
        ("", {}, HERE),
        ("0::/", {"memory.max": "max"}, HERE),
        ("0::/", {"memory.max": f"{GB}"}, GB),  # a container
        ("0::/docker/7", {"memory.max": f"{GB}"}, GB),  # one that sees the names of the machine
        ("0::/../../a", {"memory.max": f"{GB}"}, GB),
        ("0::/system.slice/s.service", {"system.slice/s.service/memory.max": f"{GB}"}, GB),  # MemoryMax= of systemd
        (
            "0::/a.slice/b",
            {"a.slice/memory.max": f"{GB}", "a.slice/b/memory.max": f"{GB + 1}"},
            GB,
        ),
        ("4:cpu,memory:/a/b\n1:cpu:/c", {"memory/a/memory.limit_in_bytes": f"{GB}"}, GB),
        ("4:memory:/a", {"memory/memory.limit_in_bytes": "9223372036854771712"}, HERE),
        ("4:memory:/a\n0::/a", {"memory/a/memory.limit_in_bytes": f"{GB}", "a/memory.max": f"{GB - 1}"}, GB - 1),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, own: str, files: dict[str, str], least: int) -> None:
    told, groups = tmp_path / "cgroup", tmp_path / "groups"
    told.write_text(own + "\n" if own else "")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text + "\n")
    assert memory_bytes(groups, told) == least


def test_where_nothing_is_told_it_is_the_machines(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path, tmp_path / "none") == HERE
