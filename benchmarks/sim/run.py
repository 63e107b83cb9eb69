"""Run a grid and write its raw JSON; finished cells are kept, so an interrupted run goes on where it stopped.

Where nothing is kept on this machine, the cells of the committed result are; `--fresh` or `--redo` runs them anew.

python -m benchmarks.sim.run main robustness      # results/<grid>.json
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.provenance import commit, head
from benchmarks.sim.grids import GRIDS
from benchmarks.sim.tables import result
from sglang_hybrid import __version__
from sglang_hybrid.sim.grid import Cell, run_cell

HERE = Path(__file__).parent
LEFT_OUT = ("gb_over_time",)  # columns left out of the committed files, for their size


def run(name: str, kept: Path) -> list[dict[str, Any]]:
    """Rows of grid `name` in order; each finished cell is appended to `kept` at once."""
    done = {}
    if kept.exists():
        for line in kept.read_text().splitlines():
            row = json.loads(line)
            done[row["cell"]] = row
    kept.parent.mkdir(parents=True, exist_ok=True)
    cells = GRIDS[name]()
    rows = []
    for i, cell in enumerate(cells):
        key = identity(cell)
        if key not in done:
            start = time.perf_counter()
            row = {"cell": key, "commit": commit(), **run_cell(cell, time.process_time).as_row()}
            for column in LEFT_OUT:
                row.pop(column, None)
            done[key] = row
            with kept.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(f"{name} {i + 1}/{len(cells)} {key} {row['token_hit_rate']:.3f} {time.perf_counter() - start:.1f}s")
        rows.append(done[key])
    return rows


def recall(name: str, kept: Path) -> None:
    """Fill `kept` with the cells of the committed result of grid `name` if it is missing."""
    if not kept.exists() and (HERE / "results" / f"{name}.json").exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("".join(json.dumps(row) + "\n" for row in result(name)["rows"]))


def forget(kept: Path, policies: set[str]) -> None:
    """Remove finished cells of `policies`, so that they run again."""
    if policies and kept.exists():
        lines = [line for line in kept.read_text().splitlines() if json.loads(line)["policy"] not in policies]
        kept.write_text("".join(f"{line}\n" for line in lines))


def identity(cell: Cell) -> str:
    """What distinguishes a cell within its grid."""
    return f"{cell.source.text} {cell.model.name} {cell.policy} {cell.capacity_bytes}"


def about(name: str) -> dict[str, Any]:
    """How the numbers of grid `name` came to be."""
    return {
        "grid": name,
        "scope": "simulated; no model is run; requests commit on arrival; 1 GB = 1e9 bytes; capacity enforced",
        **head("numpy"),
        "version": __version__,
        "processes": 1,
        "timer": "CPU time of the process: the machine is shared",
    }


def write(name: str, rows: list[dict[str, Any]]) -> Path:
    """One row a line, so that changes of a result show as changed lines."""
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    top = about(name)
    body = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(json.dumps(top)[:-1] + ', "rows": [\n' + body + "\n]}\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", nargs="+", choices=tuple(GRIDS))
    parser.add_argument("--kept", type=Path, default=HERE.parents[1] / "build" / "sim", help="finished cells")
    parser.add_argument("--fresh", action="store_true", help="forget finished cells first")
    parser.add_argument("--redo", default="", help="forget finished cells of these policies, comma-separated")
    args = parser.parse_args()
    for name in args.grid:
        kept = args.kept / f"{name}.jsonl"
        recall(name, kept)
        if args.fresh:
            kept.unlink(missing_ok=True)
        forget(kept, set(filter(None, args.redo.split(","))))
        print(write(name, run(name, kept)))


if __name__ == "__main__":
    main()
