"""How a figure came to be: machine, commit and versions, for every result file.

Call `head` before anything is measured: it fails where the commit is not known.

SGLANG_HYBRID_COMMIT   the commit, where there is no git checkout
SGLANG_HYBRID_RESULTS  the folder of results, in place of benchmarks/<area>/results
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMIT, RESULTS = "SGLANG_HYBRID_COMMIT", "SGLANG_HYBRID_RESULTS"


def no_arguments(about: str | None) -> None:
    """For a command without arguments: `--help` says what it is `about`, anything else is refused; neither runs it."""
    argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()


def machine() -> str:
    """Cores and processor: `cpu2-epyc`."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else platform.processor()
    kind = next((kind for kind in ("EPYC", "Xeon", "Ryzen", "Core") if kind in text), "other").lower()
    return f"cpu{os.cpu_count()}-{kind}"


def commit() -> str:
    """SGLANG_HYBRID_COMMIT, or the short hash of the checked-out commit. Raises RuntimeError if neither is there."""
    named = os.environ.get(COMMIT)
    if named:
        return named
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"set {COMMIT} to the commit, for there is no git checkout here: {ROOT}") from error


def version(package: str) -> str:
    """Its installed version; where it was unpacked without being installed, what the package says of itself."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module(package), "__version__", "unknown"))


def head(*packages: str) -> dict[str, Any]:
    """Machine, commit, date, Python and the versions of `packages`."""
    return {
        "machine": machine(),
        "commit": commit(),
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def place(area: str) -> Path:
    """The folder of an area's results: <SGLANG_HYBRID_RESULTS>/<area>, or benchmarks/<area>/results."""
    named = os.environ.get(RESULTS)
    return Path(named) / area if named else ROOT / "benchmarks" / area / "results"


def write(area: str, name: str, result: dict[str, Any]) -> Path:
    """Write `result` to `place(area)/<name>.json` and return the path; what it replaces is in git."""
    path = place(area) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
