"""What the machine gives to this process."""

import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_bytes(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """The machine's memory, or what the control groups of this process leave of it: a container's, a systemd unit's.

    Linux kills who takes more. `groups` is where they lie, `own` the list of those that this process is in.
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(groups, own)])


def _limits(groups: Path, own: Path) -> Iterator[int]:
    """Of each group that this process is in and of those around it, where they have one."""
    for folder, name in _folders(groups, own):
        try:
            text = (folder / name).read_text().strip()
        except OSError:  # the outermost has none, and a container does not see those around its own
            continue
        if text.isdigit():  # else "max"
            yield int(text)


def _folders(groups: Path, own: Path) -> Iterator[tuple[Path, str]]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in ["0::/", *lines]:
        number, controllers, path = line.split(":", 2)
        inner = Path() if ".." in path else Path(path.lstrip("/"))
        around = (inner, *inner.parents)
        if number == "0":
            yield from ((groups / each, "memory.max") for each in around)
        elif "memory" in controllers.split(","):  # the first version of control groups
            yield from ((groups / "memory" / each, "memory.limit_in_bytes") for each in around)
