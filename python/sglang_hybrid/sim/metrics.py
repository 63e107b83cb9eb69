"""The numbers of one replay: the columns of every table and JSON file this package writes about simulations."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.sim.latency import H100, CostModel, Floats, flops
from sglang_hybrid.sim.replay import Ints, Replay

CURVE_POINTS = 120
LENGTH_BINS = (0, 1_000, 2_000, 4_000, 7_000, 10_000, 15_000, 20_000, 32_769)


@dataclass(frozen=True)
class Outcome:
    """One cell of a grid: what a policy reached on a trace with a model and a capacity; `fields` are its columns."""

    trace: str
    model: str
    policy: str
    capacity_gb: float
    fields: dict[str, Any]

    @property
    def token_hit_rate(self) -> float:
        return float(self.fields["token_hit_rate"])

    def as_row(self) -> dict[str, Any]:
        """One flat JSON object."""
        key = {"trace": self.trace, "model": self.model, "policy": self.policy, "capacity_gb": self.capacity_gb}
        return key | self.fields


def measure(result: Replay, model: ModelSpec, seen: Ints | None = None, cost: CostModel = H100) -> dict[str, Any]:
    """Columns of a replay; `seen` (tokens of each input that came before) adds a count of impossible hits."""
    columns = hit_columns(result.n_input, result.hit_tokens, model, cost)
    columns |= cost_columns(result)
    if seen is not None:
        columns["false_hits"] = int((result.hit_tokens > seen).sum())
    return columns


def cost_columns(result: Replay) -> dict[str, Any]:
    """Columns of what a replay held, and of what its decisions took."""
    decisions_us = (result.lookup_s + result.commit_s) * 1e6
    return {
        "over_capacity_requests": result.over_capacity_requests,
        "peak_gb": _gb(float(result.used_bytes.max())),
        "mean_gb": _gb(float(result.used_bytes.mean())),
        "decision_us_mean": _round(float(decisions_us.mean())),
        "decision_us": _percentiles(decisions_us, (50, 95, 99)),
        "seconds": _round(float(decisions_us.sum()) / 1e6, 3),
        "gb_over_time": _curve(result),
    }


def hit_columns(
    n_input: Ints, hits: Ints, model: ModelSpec, cost: CostModel = H100, run: tuple[Ints, Floats] | None = None
) -> dict[str, Any]:
    """Columns that follow from the tokens skipped per request alone; shapes (requests,).

    `run`: tokens and FLOPs of each request, where these are not those of the tokens behind what it skipped.
    """
    all_flops = flops(model, n_input, np.zeros_like(n_input))
    saved = flops(model, hits, np.zeros_like(hits)) if run is None else all_flops - run[1]
    left, seconds = (n_input - hits, cost.ttft_s(model, n_input, hits)) if run is None else (run[0], cost.of(run[1]))
    return {
        "requests": len(n_input),
        "input_tokens": int(n_input.sum()),
        "hit_tokens": int(hits.sum()),
        "token_hit_rate": _round(float(hits.sum() / n_input.sum()), 6),
        "flops_saved": float(saved.sum()),
        "flop_hit_rate": _round(float(saved.sum() / all_flops.sum()), 6),
        "uncached_tokens": _percentiles(left.astype(np.float64), (5, 50, 95)),
        "ttft_ms": _percentiles(seconds * 1e3, (5, 50, 95)),
        "hit_rate_by_input_tokens": _by_length(n_input, hits),
    }


def _by_length(n_input: Ints, hits: Ints) -> dict[str, dict[str, float]]:
    """Requests and mean hit rate per request, by input length."""
    rows = {}
    for low, high in pairwise(LENGTH_BINS):
        inside = (n_input >= low) & (n_input < high)
        if inside.any():
            rate = float((hits[inside] / n_input[inside]).mean())
            rows[f"{low}-{high - 1}"] = {"requests": int(inside.sum()), "mean_hit_rate": _round(rate, 6)}
    return rows


def _curve(result: Replay) -> list[tuple[float, float]]:
    """Bytes held over time: at most CURVE_POINTS pairs (seconds, GB)."""
    n = len(result.used_bytes)
    at = np.unique(np.linspace(0, n - 1, min(n, CURVE_POINTS)).astype(np.int64))
    return [(_round(result.trace.requests[i].ts, 2), _gb(float(result.used_bytes[i]))) for i in at.tolist()]


def _percentiles(values: "np.ndarray[Any, np.dtype[np.float64]]", which: tuple[int, ...]) -> dict[str, float]:
    return {f"p{q}": _round(float(v)) for q, v in zip(which, np.percentile(values, which), strict=True)}


def _gb(n_bytes: float) -> float:
    return _round(n_bytes / 1e9, 4)


def _round(value: float, digits: int = 2) -> float:
    return round(value, digits)
