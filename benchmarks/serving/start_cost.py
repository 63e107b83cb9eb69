"""What a start of a server costs on a CPU: children that are copies of the first process, and spawned ones.

    python -m benchmarks.serving.start_cost [--rounds 2]

Processor seconds and proportional memory (shared pages counted once) of all its processes once it is ready, in turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from benchmarks import provenance
from sglang_hybrid.core.process import free_port
from sglang_hybrid.demo import model

LAUNCH = "import runpy; runpy.run_module('sglang_hybrid.launch_server', run_name='__main__', alter_sys=True)"
KINDS = {
    "copies": LAUNCH,
    "spawned": "from sglang_hybrid.engine.processes import children; children.copy_instead_of_spawn = lambda: 0; "
    + LAUNCH,
}


def started(kind: str, folder: Path, log: Path) -> dict[str, Any]:
    """One server, from its first instruction until it is ready."""
    port, begun = free_port(), time.monotonic()
    command = [sys.executable, "-c", KINDS[kind], "--model-path", str(folder), "--port", str(port)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # as the launcher does before any import
    with log.open("w") as sink, subprocess.Popen(command, stdout=sink, stderr=sink, env=environment) as first:
        while not ready(port):
            if first.poll() is not None or time.monotonic() - begun > 600:
                raise RuntimeError(f"the server did not start; see its log: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        seconds = time.monotonic() - begun
        family = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
        spent = sum(sum(process.cpu_times()[:2]) for process in family)
        memory = sum(process.memory_full_info().pss for process in family)
        for process in family:
            process.kill()
    return {"kind": kind, "cpu_s": round(spent, 1), "ready_s": round(seconds, 1), "pss_mb": round(memory / 1e6)}


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    head, rows = provenance.head("sglang", "torch", "sglang-hybrid"), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.build(Path(scratch) / "gdn", "gdn")
        for _ in range(options.rounds):
            for kind in KINDS:
                rows.append(started(kind, folder, Path(scratch) / "server.log"))
                print(rows[-1], flush=True)
    print(provenance.write("serving", "start-cost", {**head, "rows": rows}))


if __name__ == "__main__":
    main()
