"""`sglang-hybrid simulate` and `python -m sglang_hybrid.sim`: what would my trace get, and which policy."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_hybrid import __version__
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.models import find_model
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.policies import POLICIES
from sglang_hybrid.sim import elsewhere, grid, plots, workloads
from sglang_hybrid.sim.latency import HARDWARE, CostModel
from sglang_hybrid.sim.metrics import Outcome
from sglang_hybrid.sim.outputs import check_output
from sglang_hybrid.sim.readers import FORMATS
from sglang_hybrid.sim.readers.files import STDIN, spooled
from sglang_hybrid.sim.report import Report
from sglang_hybrid.sim.saving import STRATEGIES
from sglang_hybrid.sim.segments import options
from sglang_hybrid.sim.trace import Trace

DEFAULT_MODEL = "qwen3.5-35b-a3b"

_MODELS = f"preset, hub name, folder or config.json; may be repeated (default: the log's, or {DEFAULT_MODEL})"
_STRATEGY = (
    "where states are saved: as by a server's --mamba-radix-cache-strategy, or anywhere as papers simulate (default: "
    "as the log's server did, else as one does by default; generated workloads and format marconi: paper)"
)
_EPILOG = f"""example:
  sglang-hybrid simulate server.log --model Qwen/Qwen3.5-35B-A3B --capacity-gb 2,8,32
  sglang-hybrid simulate --workload documents --capacity-gb 8,32 --segments-gb 4

policies: {", ".join(POLICIES)}, each also
as pools:NAME, a server whose states and KV have a pool each
workloads: {", ".join(workloads.WORKLOADS)}
formats of traces: docs/traces.md. 1 GB = 1e9 bytes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0, or 2 when the user must fix something."""
    args = _parser().parse_args(argv)
    try:
        return _simulate(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        return 130


def _simulate(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        stack.callback(grid.forget)
        return _answer(args, [_source(text, args, stack) for text in args.trace])


def _source(text: str, args: argparse.Namespace, stack: ExitStack) -> grid.Source:
    if text == STDIN:
        text = str(stack.enter_context(spooled()))
    return grid.Source(text, args.format, args.seed, args.skip_bad, args.tokenizer)


def _answer(args: argparse.Namespace, sources: list[grid.Source]) -> int:
    if args.workload:
        sources += [grid.Source(workloads.PREFIX + name, None, args.seed) for name in _split(args.workload)]
    if not sources:
        raise ConfigError(f"name a trace file or a workload, one of {', '.join(workloads.WORKLOADS)}: nothing given")
    policies = _split(args.policy)
    if not policies:
        raise ConfigError(f"name at least one policy of {', '.join(POLICIES)}: {args.policy!r}")
    memory, ceilings = options.memory(args), not args.no_ceilings
    policies = options.rows(policies, ceilings, memory)
    if ceilings:
        policies += [name for name in grid.CEILINGS if name not in policies]
    capacities = [_number(text, "a capacity in GB") for text in _split(args.capacity_gb)]
    cost = _cost(args)
    if args.json:
        check_output(args.json)  # before the work, not after
    if args.plot:
        plots.check_plot(args.plot)
    named = [_model(name, args.context_tokens) for name in args.model or []]
    traces = [grid.trace_of(source) for source in sources]  # a bad trace is reported before any process starts
    models, whose = (named, "--model") if named else _served(traces, args.context_tokens)
    notes = [f"{t.name}: {note}" for t in traces for note in (*t.notes, *options.notes(t, memory, capacities))]
    read = dict(zip(sources, traces, strict=True))
    if ceilings:
        notes += [f"{t.name}: {note}" for source, t in read.items() for note in elsewhere.notes(grid.index_of(source))]
    cells = grid.cells(sources, models, policies, capacities, cost, memory, args.strategy)
    cells = [cell for cell in cells if grid.has_room(cell, read[cell.source])]
    _try(cells, read)
    lines = [*(f"note: {note}" for note in notes), *(_costs(model, whose) for model in models)]
    for line in [*lines, *_states(cells, read)]:
        print(line)  # noqa: T201
    if args.jobs > 1:  # other processes read them for themselves
        traces.clear()
        read.clear()
        grid.forget()
    report = Report(tuple(_run(cells, args.jobs)))
    report.print(Console())
    if args.json:
        report.write_json(args.json, {**_about(args, models, cost), "notes": notes})
    if args.plot:
        plots.plot_hit_rates(report, args.plot)
    return 0


def _try(cells: list[grid.Cell], traces: dict[grid.Source, Trace]) -> None:
    """Open what the cells need: a policy that does not exist is said before any process starts."""
    for cell in {(cell.policy, cell.model): cell for cell in cells}.values():
        if cell.policy.endswith(options.SUFFIX):
            grid.open_segments(cell, traces[cell.source])
        elif cell.policy not in grid.CEILINGS:
            grid.open_plain(cell, traces[cell.source])


def _served(traces: list[Trace], context_tokens: int | None) -> tuple[list[ModelSpec], str]:
    """The model that served all traces if they say so, else the default; and where it comes from."""
    found = {trace.model for trace in traces}
    served = found.pop() if len(found) == 1 else None
    if served is None:
        return [_model(DEFAULT_MODEL, context_tokens)], "the default; --model names yours"
    return [_sized(served, context_tokens)], "of the request log"


def _costs(model: ModelSpec, whose: str) -> str:
    return (
        f"model: {model.name} ({whose}): {model.kv_bytes_per_token:,} bytes of KV a token, "
        f"{model.checkpoint_bytes:,} bytes a state"
    )


def _states(cells: list[grid.Cell], traces: dict[grid.Source, Trace]) -> list[str]:
    """Where states are saved, a line for each way."""
    found: dict[str, None] = {}
    for cell in cells:
        if cell.model.is_recurrent:
            saving = cell.saving(traces[cell.source])
            how = "anywhere, none for the end of a prompt, as papers simulate" if saving is None else saving.describe()
            found[f"states: {cell.model.name}, {traces[cell.source].name}: {how}"] = None
    return list(found)


def _run(cells: list[grid.Cell], jobs: int) -> list[Outcome]:
    done: dict[int, Outcome] = {}
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("replaying", total=len(cells))
        for i, outcome in grid.run(cells, jobs):
            done[i] = outcome
            bar.update(task, advance=1, description=f"{outcome.policy} at {outcome.capacity_gb:g} GB")
    return [done[i] for i in range(len(cells))]


def _model(name: str, context_tokens: int | None) -> ModelSpec:
    return _sized(find_model(name), context_tokens)


def _sized(spec: ModelSpec, context_tokens: int | None) -> ModelSpec:
    return spec if context_tokens is None else replace(spec, context_tokens=context_tokens)


def _cost(args: argparse.Namespace) -> CostModel:
    base = HARDWARE[args.hardware]
    if args.tflops is not None and args.tflops <= 0:
        raise ConfigError(f"--tflops must be positive, got {args.tflops}")
    overhead = base.overhead_s if args.ttft_overhead_ms is None else args.ttft_overhead_ms / 1e3
    return CostModel(overhead, base.seconds_per_flop if args.tflops is None else 1.0 / (args.tflops * 1e12))


def _split(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{what} must be a number, got {text!r}") from None


def _about(args: argparse.Namespace, models: list[ModelSpec], cost: CostModel) -> dict[str, object]:
    return {
        "version": __version__,
        "seed": args.seed,
        "ttft": {"overhead_s": cost.overhead_s, "seconds_per_flop": cost.seconds_per_flop},
        "models": [
            {
                "name": m.name,
                "kv_bytes_per_token": m.kv_bytes_per_token,
                "checkpoint_bytes": m.checkpoint_bytes,
                "context_tokens": m.context_tokens,
            }
            for m in models
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid simulate",
        description="Replay traces through prefix-cache policies and say which policy is best at which capacity.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trace", nargs="*", metavar="TRACE", help="trace file, folder of them, - or workload:NAME?seed=1&sps=0.5")
    add("--format", choices=FORMATS, help="format of the trace files (default: detected)")
    add("--skip-bad", action="store_true", help="count rows that cannot be used instead of refusing the trace")
    add("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer.json of a model: real tokens for traces of text")
    add("--workload", metavar="NAMES", help="generated workloads, comma-separated")
    add("--seed", type=int, default=0, help="seed of generated workloads (default: 0)")
    add("--policy", default="lru,marconi,forecast", help="policies, comma-separated (default: %(default)s)")
    add("--capacity-gb", default="2,8,32", help="capacities in GB, comma-separated (default: %(default)s)")
    add("--model", action="append", metavar="MODEL", help=_MODELS)
    add("--context-tokens", type=int, metavar="N", help="longest sequence the server takes (default: the model's)")
    add("--strategy", choices=STRATEGIES, default="auto", help=_STRATEGY)
    options.add_flags(add)
    add("--json", type=Path, metavar="OUT", help="write all columns as JSON")
    add("--plot", type=Path, metavar="PNG", help="plot hit rate against capacity (needs matplotlib)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    add("--no-ceilings", action="store_true", help="leave out the clairvoyant, bound and unbounded rows")
    add(
        "--hardware", choices=tuple(HARDWARE), default="h100", help="prices of the TTFT estimate (default: %(default)s)"
    )
    add("--tflops", type=float, help="achieved TFLOP/s instead of the hardware's")
    add("--ttft-overhead-ms", type=float, help="fixed part of a TTFT instead of the hardware's")
    return parser
