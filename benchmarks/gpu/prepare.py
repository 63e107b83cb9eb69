"""Make the folder of an offline kit, for `scripts/gpu --kit`: archives that are there, a wheel of this checkout, flags.

    python -m benchmarks.gpu.prepare --archives FOLDER --to FOLDER [--over WHEEL ... --without GLOB ...]
                                     [--set NAME=VALUE ...] [-- SERVER FLAG ...]

The default flags are for an SGLang without FlashAttention and FlashInfer's sampling, as small kits have it. A wheel of
`--over` takes the place of its package in the archives, which are packed anew, without the files that `--without`
names. `--set` gives environment variables to the servers. For another SGLang than the archives', with elastic memory:

    python -m benchmarks.gpu.prepare --archives FOLDER --to .kit --over sglang-0.5.21-cp312-*.whl \\
        --without 'sglang/multimodal_gen/*' 'sglang/srt/rust_extensions/*' \\
        --set SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1 SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python

Its Rust core is built for one PyTorch and ends the process with another; stock servers then take the Python core.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import kit
from benchmarks.provenance import ROOT

FLAGS = [
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--mm-feature-transport", "cpu", "--mem-fraction-static", "0.85", "--cuda-graph-max-bs-decode", "64",
]  # fmt: skip


def repack(archives: Sequence[Path], wheels: Sequence[Path], without: Sequence[str], target: Path) -> None:
    """Pack `archives` into one, `target`, with `wheels` in place of their packages and nothing that `without` names."""
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch)
        for archive in archives:
            kit.extract(archive, site)
        for wheel in wheels:
            name = wheel.name.split("-")[0]
            for old in (site / name, *site.glob(f"{name}-*.dist-info")):
                shutil.rmtree(old, ignore_errors=True)
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(site)
        for pattern in without:
            for found in site.glob(pattern):
                shutil.rmtree(found) if found.is_dir() else found.unlink()
        with tarfile.open(target, "w:xz") as packed:
            packed.add(site, ".")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--archives", type=Path, required=True, help="folder with *.tar.xz")
    parser.add_argument("--over", type=Path, nargs="*", default=[], help="wheels that replace packages")
    parser.add_argument("--without", nargs="*", default=[], help="files to leave out of a repacked archive")
    parser.add_argument("--set", nargs="*", default=[], help="environment variables of the servers")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("flags", nargs="*", help="after --: flags of every server, instead of the default ones")
    options = parser.parse_args()
    archives = sorted(options.archives.glob("*.tar.xz"))
    wrong = [f"no such wheel: {wheel}" for wheel in options.over if not wheel.is_file()]
    wrong += [] if archives else [f"no archive (*.tar.xz) in {options.archives}"]
    wrong += [f"--set takes NAME=VALUE: {pair}" for pair in options.set if "=" not in pair]
    wrong += ["--without is for what --over packs anew"] if options.without and not options.over else []
    if wrong:
        parser.exit(2, f"error: {wrong[0]}\n")
    options.to.mkdir(parents=True, exist_ok=True)
    for old in (*options.to.glob("*.whl"), *options.to.glob("*.tar.xz")):
        old.unlink()
    if options.over:
        repack(archives, options.over, options.without, options.to / "packages.tar.xz")
    else:
        for file in archives:
            shutil.copyfile(file, options.to / file.name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(options.to), str(ROOT)]
    subprocess.run(build, check=True)
    settings = {
        "flags": options.flags or FLAGS,
        "environment": dict(pair.split("=", 1) for pair in options.set),
    }
    (options.to / kit.SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")
    size = sum(file.stat().st_size for file in options.to.iterdir())
    print(f"{options.to}: {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
