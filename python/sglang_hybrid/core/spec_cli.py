"""`sglang-hybrid spec`: what models cost, and what a budget of memory holds of them."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.models import find_model
from sglang_hybrid.core.planner import Split, splits
from sglang_hybrid.core.quantized import SCALED
from sglang_hybrid.core.segments import STATE_DTYPES, segment_costs
from sglang_hybrid.core.spec import DTYPE_BYTES, PRESETS, ModelSpec, describe

SCHEMA = "sglang-hybrid/spec/1"
CpuSizes = Callable[[int, ModelSpec], tuple[int, int]]

SEGMENT_TOKENS = 1024
"""Of the segment whose size is said."""

_COSTS = (
    "kv_bytes_per_token", "head_kv_bytes_per_token", "checkpoint_bytes", "conv_bytes", "flops_per_token",
    "flops_per_token_pair", "chunk_tokens", "context_tokens", "kv_dtype", "state_dtype", "conv_dtype", "tp",
    "layer_counts",
)  # fmt: skip


def main(argv: Sequence[str], cpu_sizes: CpuSizes) -> int:
    """Run the command; `cpu_sizes(bytes, spec)` are tokens and states of a server without a GPU.

    Raises ConfigError for bad input.
    """
    args = _parser().parse_args(argv)
    if not args.models:
        raise ConfigError(f"name at least one model: a folder, a config.json or one of {', '.join(PRESETS)}")
    if args.memory_gb is None and (args.cpu or args.ratio is not None):
        raise ConfigError(f"say how much memory is to be split, add --memory-gb: {' '.join(argv)}")
    if args.cpu and args.ratio is not None:
        raise ConfigError(f"a server without a GPU has no ratio, leave out --cpu or --ratio: {args.ratio:g}")
    plans = [(spec, _plan(spec, args, cpu_sizes)) for spec in (_spec(name, args) for name in args.models)]
    if args.json:
        rows = [_as_json(spec, plan, args.memory_gb) for spec, plan in plans]
        print(json.dumps({"schema": SCHEMA, "models": rows}, indent=1))  # noqa: T201
        return 0
    for spec, plan in plans:
        for key, value in [*describe(spec), *_segment_lines(spec), *_lines(spec, plan, args.memory_gb)]:
            print(f"{key:<24} {value}")  # noqa: T201
    return 0


def _spec(name: str, args: argparse.Namespace) -> ModelSpec:
    spec = find_model(name)
    if args.dtype or args.kv_dtype or args.state_dtype:
        spec = spec.with_dtypes(
            kv_dtype=args.kv_dtype or (None if spec.kv_dtype == SCALED else args.dtype),
            conv_dtype=args.dtype,
            state_dtype=args.state_dtype,
        )
    return spec if args.tp == 1 else spec.per_rank(args.tp)


def _plan(spec: ModelSpec, args: argparse.Namespace, cpu_sizes: CpuSizes) -> list[Split]:
    if args.memory_gb is None:
        return []
    if not math.isfinite(args.memory_gb) or args.memory_gb <= 0:
        raise ConfigError(f"give a positive number of GB to --memory-gb: {args.memory_gb:g}")
    budget_bytes = round(args.memory_gb * 1e9)
    if args.cpu:
        tokens, states = cpu_sizes(budget_bytes, spec)
        return [Split("without a GPU", states, tokens, spec.bytes_for(tokens, states))]
    return splits(spec, budget_bytes, args.ratio)


def _lines(spec: ModelSpec, plan: list[Split], memory_gb: float | None) -> list[tuple[str, str]]:
    rows = [] if memory_gb is None else [("memory", f"{memory_gb:g} GB for KV and states{_per_rank(spec)}")]
    for split in plan:
        held = f"{split.tokens:,} tokens"
        if spec.is_recurrent:
            share = 100 * split.states * spec.checkpoint_bytes / split.used_bytes
            held = f"{split.states:,} states and {held}, {share:.0f} % of the bytes for states"
        rows.append((f"  {split.name}", held))
    return rows


def _segment(spec: ModelSpec) -> dict[str, Any] | None:
    """What a segment of SEGMENT_TOKENS holds, None for models without segments."""
    try:
        costs = {dtype: segment_costs(spec, dtype) for dtype in STATE_DTYPES}
    except ConfigError:
        return None
    first = next(iter(costs.values()))
    return {
        "tokens": SEGMENT_TOKENS,
        "state_bytes": {dtype: its.whole_bytes for dtype, its in costs.items()},
        "least_state_bytes": {dtype: its.state_bytes for dtype, its in costs.items()},
        "kv_bytes": SEGMENT_TOKENS * first.token_bytes,
        "jump_flops": first.jump_flops,
    }


def _segment_lines(spec: ModelSpec) -> list[tuple[str, str]]:
    found = _segment(spec)
    if found is None:
        return []
    sizes = []
    for dtype, most in found["state_bytes"].items():
        least = found["least_state_bytes"][dtype]
        span = f"{most / 2**20:,.1f}" if least == most else f"{least / 2**20:,.1f} to {most / 2**20:,.1f}"
        sizes.append(f"{span} MiB in {dtype}")
    kv = f"{found['kv_bytes'] / 2**20:,.1f} MiB of KV"
    return [(f"segment of {SEGMENT_TOKENS:,}", f"{kv}, and states of {', '.join(sizes)}")]


def _per_rank(spec: ModelSpec) -> str:
    return f" of each of {spec.tp} ranks" if spec.tp > 1 else ""


def _as_json(spec: ModelSpec, plan: list[Split], memory_gb: float | None) -> dict[str, Any]:
    costs = {key: getattr(spec, key) for key in _COSTS}
    sizes = {"segment": _segment(spec), "memory_gb": memory_gb}
    return {"name": spec.name, **costs, **sizes, "splits": [asdict(split) for split in plan]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid spec",
        description="What a model costs: bytes per token and state, FLOPs; with --memory-gb, how many of both fit.",
        epilog="""example:
  sglang-hybrid spec Qwen/Qwen3.5-35B-A3B --memory-gb 40 --json

The memory is what is left for KV and states when the weights are loaded. A ratio is --mamba-full-memory-ratio, bytes
of states per byte of KV; 0.9 is SGLang's default. SGLang rounds tokens down to whole pages.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help="preset, hub name of one, model folder or config.json")
    add("--memory-gb", type=float, metavar="N", help="memory for KV and states of one rank; 1 GB = 1e9 bytes")
    add("--ratio", type=float, metavar="R", help="this split only")
    add("--cpu", action="store_true", help="split as a server without a GPU does (--hybrid-cpu-memory-gb)")
    add("--dtype", choices=tuple(DTYPE_BYTES)[:3], help="of KV and of convolution windows, as a server's --dtype")
    add("--kv-dtype", choices=tuple(DTYPE_BYTES), help="of KV only, as --kv-cache-dtype")
    add("--state-dtype", choices=tuple(DTYPE_BYTES)[:3], help="of recurrent states, as SGLANG_MAMBA_SSM_DTYPE")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel size; costs are those of one rank")
    add("--json", action="store_true", help="print JSON")
    return parser
