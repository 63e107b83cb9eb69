"""How a figure came to be: machine, commit and versions, for every result file."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def machine() -> str:
    """Cores and processor: `cpu2-epyc`."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else platform.processor()
    kind = next((kind for kind in ("EPYC", "Xeon", "Ryzen", "Core") if kind in text), "other").lower()
    return f"cpu{os.cpu_count()}-{kind}"


def commit() -> str:
    """Short hash of the checked-out commit."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def head(*packages: str) -> dict[str, Any]:
    """Machine, commit, date, Python and the versions of `packages`."""
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "machine": machine(),
        "commit": commit(),
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "python": platform.python_version(),
        "versions": versions,
    }


def write(area: str, name: str, result: dict[str, Any]) -> Path:
    """Write `result` to benchmarks/<area>/results/<name>.json and return the path; what it replaces is in git."""
    path = ROOT / "benchmarks" / area / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
