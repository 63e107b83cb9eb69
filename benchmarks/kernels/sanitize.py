"""copy_slots on small pools under compute-sanitizer, and without it many times over.

python -m benchmarks.kernels.sanitize              # every tool, then the repetitions; results in sanitize.json
python -m benchmarks.kernels.sanitize --copies 200 # the repetitions alone: what runs under a tool
python -m benchmarks.kernels.sanitize --rehearse   # on a CPU, by the naive path

Pairs form chains and name destinations twice, so a copy is right only if pairs run in order in every block. racecheck
sees races in shared memory alone. A race in global memory shows as a wrong bit in one of the repetitions.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks import provenance
from benchmarks.kernels.check import backend
from benchmarks.kernels.driver import ended
from sglang_hybrid_kernels.copy_slots import copy_slots

TOOLS = ("racecheck", "memcheck", "initcheck", "synccheck")
FAULT = 86
"""Status with which the sanitizer ends where it found something."""

SLOTS, UNDER_TOOL = 6, 3
CHAIN = ([0, 1, 2, 3, 4, 5, 2, 0], [1, 2, 3, 4, 5, 0, 4, 4])


def pools(device: torch.device, seed: int) -> list[Tensor]:
    """States and windows in SGLang's layout, and a page-major pool of odd elements."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(3, SLOTS, 4, 32, 64, generator=generator)
    windows = torch.randn(3, SLOTS, 96, 3, generator=generator).bfloat16()
    odd = torch.randn(SLOTS, 3, 4099, generator=generator).half()
    return [states.to(device), windows.to(device), odd.to(device).transpose(0, 1)]


def copies(rounds: int, device: torch.device, checked: str) -> int:
    """Rounds in which a bit differs from the naive path on the host."""
    wrong = 0
    source, destination = (torch.tensor(slots) for slots in CHAIN)
    for seed in range(rounds):
        wanted, got = pools(torch.device("cpu"), seed), pools(device, seed)
        with backend("naive"):
            copy_slots(wanted, source, destination)
        with backend(checked):
            copy_slots(got, source.to(device), destination.to(device), check_slots=False)
        same = (torch.equal(a, b.cpu()) for a, b in zip(wanted, got, strict=True))
        wrong += not all(same)
    return wrong


def under(tool: str, timeout: float, flags: list[str]) -> dict[str, Any]:
    """What one tool said of a few rounds."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"status": "not available: compute-sanitizer is not in PATH"}
    this = [sys.executable, "-m", "benchmarks.kernels.sanitize", "--copies", str(UNDER_TOOL), *flags]
    problem, lines = ended([program, "--tool", tool, "--error-exitcode", str(FAULT), *this], timeout)
    clean = not problem and any(line.startswith("wrong rounds: 0 ") for line in lines)
    return {"status": "clean" if clean else f"found: {problem or 'see the last lines'}", "last_lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, help="run this many rounds in this process and say how many were wrong")
    parser.add_argument("--rounds", type=int, default=200, help="rounds without a tool")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for each tool")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, by the naive path")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        raise SystemExit("run on an NVIDIA GPU, or with --rehearse")
    device, checked = (torch.device("cpu"), "naive") if args.rehearse else (torch.device("cuda"), "triton")
    if args.copies:
        wrong = copies(args.copies, device, checked)
        print(f"wrong rounds: {wrong} of {args.copies}")
        raise SystemExit(int(wrong > 0))
    about = provenance.head("torch", "triton")
    tools = {tool: under(tool, args.timeout, ["--rehearse"] * args.rehearse) for tool in TOOLS}
    wrong = copies(args.rounds, device, checked)
    result = {**about, "tools": tools, "rounds": args.rounds, "wrong_rounds": wrong}
    for tool, row in tools.items():
        print(f"{tool:12} {row['status']}")
    print(f"{'repetitions':12} wrong rounds: {wrong} of {args.rounds}")
    print(provenance.write("kernels", "sanitize", result))
    raise SystemExit(int(wrong > 0 or any(row["status"].startswith("found") for row in tools.values())))


if __name__ == "__main__":
    main()
