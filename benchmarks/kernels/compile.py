"""Compile every kernel of every case for sm_80 and sm_90 without a GPU: registers, spills, shared memory.

python -m benchmarks.kernels.compile [--operation copy_slots] [--no-write]

With other versions of Triton than the installed one: toolchains.py.

The operation itself is called, on CPU tensors, with a driver that only names a target and a launch that only compiles:
so exactly the specialisations that the operation launches are compiled. Nothing runs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from benchmarks import provenance
from benchmarks.kernels.registry import Case, cases
from sglang_hybrid_kernels import dispatch

TARGETS = {"sm_80": 80, "sm_90": 90}
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10}
"""Shared memory one block may have."""

COLUMNS = {
    "registers": "32-bit registers per thread; at most 255",
    "spill_bytes": "bytes per thread that do not fit into registers and live in local memory",
    "shared_bytes": "shared memory per block (limits: 163 KiB on sm_80, 227 KiB on sm_90)",
    "memory": "instructions that load from or store to global or shared memory, and how many stand in the PTX",
    "constants": "compile-time constants of the specialisation",
}


class _Target:
    """Stands in for the CUDA driver while nothing runs. Its device number is the capability: Triton keeps what it
    compiled by device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[list[tuple[str, dict[str, Any], Any]]]:
    """Inside, a launch compiles for `capability` and is listed: kernel name, constants, compiled kernel."""
    launches: list[tuple[str, dict[str, Any], Any]] = []
    run, before, mode = JITFunction.run, driver._active, os.environ.get(dispatch.VARIABLE)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        constants = {name: value for name, value in kwargs.items() if name.isupper()}
        launches.append((self.__name__, constants, kernel))
        return kernel

    os.environ[dispatch.VARIABLE] = "triton"
    dispatch.mode.cache_clear()
    driver.set_active(_Target(capability))
    JITFunction.run = compile_only
    try:
        yield launches
    finally:
        JITFunction.run = run
        driver._active = before
        os.environ.pop(dispatch.VARIABLE)
        if mode is not None:
            os.environ[dispatch.VARIABLE] = mode
        dispatch.mode.cache_clear()


def usage(cubin: bytes) -> dict[str, int]:
    """Registers per thread and bytes of stack (spilled registers) as cuobjdump reads them from a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", text.stdout)
    assert found, text.stdout
    return {"registers": int(found[1]), "spill_bytes": int(found[2]) + int(found[3])}


def memory(ptx: str) -> dict[str, int]:
    """`{"ld.global.v4.b32": 16, ...}`: loads and stores by kind, cache hints left out."""
    kinds = re.findall(r"\b(ld|st)\.(?:volatile\.)?(global|shared)[\w:.]*?((?:\.v\d)?\.\w+)\s", ptx)
    return dict(sorted(Counter(f"{move}.{space}{width}" for move, space, width in kinds).items()))


def compiled(case: Case, capability: int) -> list[dict[str, Any]]:
    """One row for each different kernel that the case launches. Raises what the compiler raises."""
    inputs = case.inputs(torch.device("cpu"), torch.Generator().manual_seed(0), True)
    with compiling_for(capability) as launches:
        case.call(**inputs)
    if not launches:
        raise ValueError(f"the case must launch at least one Triton kernel: {case.operation} {case.name}")
    rows = {}
    for name, constants, kernel in launches:
        meta = kernel.metadata
        rows[kernel.hash] = {
            "kernel": name,
            "constants": {key: str(value) for key, value in constants.items()},
            "warps": meta.num_warps,
            "stages": meta.num_stages,
            "shared_bytes": meta.shared,
            "memory": memory(kernel.asm["ptx"]),
            **usage(kernel.asm["cubin"]),
        }
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operation", help="compile one operation's cases; default all")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--expect-triton", help="fail unless Triton has this version")
    args = parser.parse_args()
    if args.expect_triton not in (None, triton.__version__):
        raise SystemExit(f"put Triton {args.expect_triton} first in PYTHONPATH; found {triton.__version__}")
    rows = []
    for case in cases(args.operation):
        for name, capability in TARGETS.items():
            for row in compiled(case, capability):
                rows.append({"operation": case.operation, "case": case.name, "target": name, **row})
                print(
                    f"{case.operation:20} {case.name:36} {name} {row['kernel']:28} {row['registers']:4} registers "
                    f"{row['spill_bytes']:5} spilled {row['shared_bytes']:7} shared",
                    flush=True,
                )
    if not args.no_write:
        result = {**provenance.head("torch", "triton"), "columns": COLUMNS, "rows": rows}
        print(provenance.write("kernels", "compile", result))


if __name__ == "__main__":
    main()
