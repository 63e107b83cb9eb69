"""Compile every kernel with each Triton that a supported SGLang installs, beside the one that is installed here.

python -m benchmarks.kernels.toolchains [--version 3.6.0] [--operation copy_slots] [--cache FOLDER]

SGLang pins torch, and torch pins Triton. A wheel is fetched once from the package index, unpacked into a cache folder
and put in front of the path of a process of its own that runs `compile.py`. A Triton that cannot be fetched is a
failure, never a pass.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks import provenance

PINNED = {"0.5.17": "3.6.0", "0.5.21": "3.7.1", "0.5.23": "3.8.0"}
"""SGLang -> the Triton that its torch asks for on Linux (torch 2.11.0, 2.13.0 and 2.14.1)."""

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sglang-hybrid" / "triton"


def folder(version: str, cache: Path = CACHE) -> Path:
    """Where Triton `version` lies unpacked; fetched if need be. Raises RuntimeError where that fails."""
    place = cache / f"{version}-{sys.implementation.cache_tag}"
    if place.exists():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", temporary]
        done = subprocess.run([*fetch, f"triton=={version}"], capture_output=True, text=True)
        wheels = list(Path(temporary).glob("triton-*.whl"))
        if done.returncode or not wheels:
            said = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            remedy = f"connect to a package index, or unpack the wheel of Triton {version} to {place}"
            raise RuntimeError(f"{remedy}: {said}")
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            for entry in wheel.infolist():
                file = Path(wheel.extract(entry, unpacked))
                file.chmod(entry.external_attr >> 16 & 0o777 or 0o644)  # ptxas and cuobjdump are programs
        shutil.move(unpacked, place)
    return place


def compiled(version: str, operation: str | None = None, cache: Path = CACHE) -> subprocess.CompletedProcess[str]:
    """`compile.py` run with Triton `version`; its rows are on stdout, and it returns 0 if every kernel compiled."""
    path = [str(provenance.ROOT), str(provenance.ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    if version != importlib.metadata.version("triton"):
        path.insert(0, str(folder(version, cache)))
    command = [sys.executable, "-m", "benchmarks.kernels.compile", "--no-write", "--expect-triton", version]
    command += ["--operation", operation] if operation else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", help="one Triton; default all that supported SGLangs install")
    parser.add_argument("--operation", help="compile one operation's cases; default all")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of unpacked wheels; default %(default)s")
    args = parser.parse_args()
    failed = []
    for version in [args.version] if args.version else sorted(set(PINNED.values())):
        try:
            done = compiled(version, args.operation, args.cache)
        except RuntimeError as error:
            failed.append(version)
            print(f"Triton {version}: not available: {error}", flush=True)
            continue
        rows = done.stdout.splitlines()
        print(f"Triton {version}: {len(rows)} kernels compiled, exit status {done.returncode}", flush=True)
        if done.returncode:
            failed.append(version)
            print("\n".join((rows[-1:] or [""]) + done.stderr.splitlines()[-20:]), flush=True)
    if failed:
        raise SystemExit(f"kernels were not compiled by Triton: {', '.join(failed)}")


if __name__ == "__main__":
    main()
