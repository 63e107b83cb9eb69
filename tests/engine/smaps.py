"""What the system says of one kind of mapping, whatever else the process or its neighbours do with memory."""

from __future__ import annotations

from pathlib import Path


def unforked_bytes(pid: int | str = "self") -> int:
    """Bytes in memory or swap of the mappings that a fork does not get: those of `HostDriver`, and no others."""
    total = size = 0
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in ("Rss", "Swap"):
            size += int(value.split()[0]) * 1024
        elif name == "VmFlags":  # the last line of a mapping
            total += size if "dc" in value.split() else 0
            size = 0
    return total
