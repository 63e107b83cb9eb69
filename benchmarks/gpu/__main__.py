"""A day on a machine with an NVIDIA card: `scripts/gpu [--part NAME ...] [--kit FOLDER] [--out FOLDER] [--rehearse]`.

Each part runs in a process of its own, for nine minutes at most, and can be run alone; one that fails does not stop the
next. Raw results and logs go to --out, with summary.md: what is proven, what failed, what was not run. If $OUT names a
folder, the page and an archive of the results go there as well. Without git, SGLANG_HYBRID_COMMIT names the commit.
`--rehearse` runs everything on the CPU, small: it proves the commands, not the GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from benchmarks import provenance
from benchmarks.gpu import kit, summary
from benchmarks.gpu.parts import PARTS, Part
from sglang_hybrid.core.errors import ConfigError

FAILED, TIMED_OUT, DONE = "failed", "ran past its limit", "done"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__)
    parser.add_argument("--part", nargs="*", choices=list(PARTS), default=list(PARTS), help="default: all, in order")
    parser.add_argument("--kit", type=Path, help="folder of an offline kit, where SGLang is not installed")
    parser.add_argument("--out", type=Path, default=Path("build/gpu/results"))
    parser.add_argument("--work", type=Path, default=Path("build/gpu"), help="where kit and models are unpacked")
    parser.add_argument("--model", type=Path, help="folder of a model for the servers, default: a small random one")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small")
    parser.add_argument("server_flags", nargs="*", help="after --: further flags of every server")
    options = parser.parse_args()
    if not options.rehearse and not _card():
        parser.exit(2, "error: torch finds no CUDA device here; add --rehearse to try the commands on the CPU\n")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        packages = kit.unpack(options.kit, options.work) if options.kit else kit.Packages()
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    ends: dict[str, str] = {}
    for name in options.part:
        start = time.monotonic()
        ends[name] = _run(name, PARTS[name], options, packages)
        print(f"{name}: {ends[name]} after {time.monotonic() - start:.0f} s", flush=True)
        page = summary.page(options.out, ends, rehearsed=options.rehearse)
        (options.out / "summary.md").write_text(page)
        if folder := os.environ.get("OUT"):
            _hand_over(options.out, Path(folder))
    print((options.out / "summary.md").read_text())
    return int(any(end != DONE for end in ends.values()))


def _hand_over(results: Path, folder: Path) -> None:
    """The page and one archive of everything: what brings results from another machine may count files."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(results / "summary.md", folder / "summary.md")
    with tarfile.open(folder / "results.tar.xz", "w:xz") as archive:
        archive.add(results, "results")


def _card() -> bool:
    import torch

    return torch.cuda.is_available()


def _run(name: str, part: Part, options: argparse.Namespace, packages: kit.Packages) -> str:
    command = [sys.executable, *part.command]
    command += ["--rehearse"] if options.rehearse else []
    command += ["--out", str(options.out)] if part.writes_to else []
    if part.packages:
        command += ["--work", str(options.work), "--limit-s", str(part.limit_s * 0.8)]
        command += [argument for flag, value in (("--kit", options.kit), ("--model", options.model)) if value
                    for argument in (flag, str(value))]  # fmt: skip
        command += ["--", *options.server_flags] if options.server_flags else []
    environment = {**os.environ, **packages.environment, provenance.RESULTS: str(options.out.resolve())}
    with (options.out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # servers are stopped on the way out
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return TIMED_OUT
    return DONE if status == 0 else FAILED


if __name__ == "__main__":
    sys.exit(main())
