"""Results as text: one table for each operation, the roofline in its first row."""

from __future__ import annotations

from typing import Any

WIDTH = 62


def lines(result: dict[str, Any]) -> list[str]:
    """One operation: the roofline, every case with its baselines, and what went wrong."""
    rows = result["rows"]
    name = result.get("operation") or (rows[0]["operation"] if rows else "?")
    text = [f"== {name}: {result['status']} ({result.get('device', 'no device was reached')})"]
    if ceilings := result.get("ceilings"):
        rates = f"{ceilings['copy_gb_per_s']:.0f} GB/s, product of matrices {ceilings['matmul_tflops']:.0f} TFLOP/s"
        text.append(f"  {'roofline, measured: copy ' + rates:{WIDTH}}")
    for row in rows:
        text.append(f"  {row['case']:{WIDTH}} {_speed(row) or _verdict(row)}")
        for other, times in row.get("baselines", {}).items():
            text.append(f"    {other:{WIDTH - 2}} {_other(times, row)}")
        text += [f"    {_options(tried)}" for tried in row.get("sweep", [])]
    return text + [f"  | {line}" for line in result.get("last_lines", [])]


def overview(results: list[dict[str, Any]]) -> list[str]:
    """What is proven and what is not, one line for each operation."""
    text = []
    for result in results:
        passed = sum(bool(row.get("passed")) for row in result["rows"])
        timed = sum("p50" in row for row in result["rows"])
        counts = f"{passed} of {len(result['rows'])} cases right, {timed} timed"
        text.append(f"{result['operation']:20} {result['status']:28} {counts}")
    return text


def _verdict(row: dict[str, Any]) -> str:
    if "passed" not in row:
        return "not finished"
    for problem in ("raised", "not timed"):
        if problem in row:
            return f"{problem}: {row[problem].splitlines()[0][:100]}"
    word = "right" if row["passed"] else "WRONG"
    return f"{word}: error {row['error']:.1e}, by head {row['head_error']:.1e}, same bits {row['same_bits']}"


def _spread(times: dict[str, float]) -> str:
    late = "" if times["hidden"] == 1 else f", launch hidden {times['hidden']:.0%}"
    return f"{times['p50']:9.1f} us [{times['p10']:.1f}, {times['p90']:.1f}]{late}"


def _speed(row: dict[str, Any]) -> str:
    share = f"  {row['share_of_floor']:.0%} of the roofline" if "share_of_floor" in row else ""
    return _spread(row) + share if "p50" in row else ""


def _other(times: dict[str, Any], row: dict[str, Any]) -> str:
    if "not available" in times:
        return f"not available: {times['not available'].splitlines()[0][:100]}"
    differs = f", result differs by {times['differs']:.1e}" if "differs" in times else ""
    return f"{_spread(times)}  {times['p50'] / row['p50']:.2f} x ours{differs}"


def _options(tried: dict[str, Any]) -> str:
    named = f"warps {tried['num_warps']}, stages {tried['num_stages']}"
    if "p50" in tried:
        return f"{named:{WIDTH - 2}} {_spread(tried)}"
    return f"{named:{WIDTH - 2}} {'wrong' if 'wrong' in tried else tried['not available'].splitlines()[0][:100]}"
