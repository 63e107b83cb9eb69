"""Tables of the README from the raw JSON: ratios to Marconi, distance to LRU, share of the gap to the clairvoyant row.

python -m benchmarks.sim.tables [--readme]
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
TARGETS = {"sharegpt": 1.25, "lmsys": 1.15, "agentic": 1.5, "swebench": 2.0, "fewshot": 2.4}
Cell = dict[str, float]  # policy -> token hit rate


def result(grid: str) -> dict[str, Any]:
    """The committed result of a grid."""
    file = HERE / "results" / f"{grid}.json"
    if not file.exists():
        raise FileNotFoundError(f"no results yet; run: python -m benchmarks.sim.run {grid}")
    return dict(json.loads(file.read_text()))


def groups(rows: list[dict[str, Any]]) -> Iterator[tuple[str, float, Cell, list[dict[str, Any]]]]:
    """(trace, capacity, hit rate by policy, rows); adds `best marconi`: fixed alphas and tuners, in hindsight."""
    found: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["trace"], row["model"], row["capacity_gb"]), []).append(row)
    for (trace, _, gb), members in found.items():
        rates = {r["policy"]: float(r["token_hit_rate"]) for r in members}
        alphas = [rate for policy, rate in rates.items() if policy.startswith("marconi")]
        if alphas:
            rates["best marconi"] = max(alphas)
        yield trace, gb, rates, members


def workload(trace: str) -> str:
    """The workload of a trace name, without parameters and seed."""
    return trace.partition("#")[0].partition(",")[0]


def main_table(rows: list[dict[str, Any]]) -> str:
    """Mean hit rate per workload and capacity, over seeds."""
    columns = (
        "lru", "superseded", "marconi", "marconi-paper", "best marconi", "forecast", "clairvoyant", "bound", "unbounded"
    )  # fmt: skip
    cells: dict[tuple[str, float], list[Cell]] = {}
    for trace, gb, rates, _ in groups(rows):
        cells.setdefault((workload(trace), gb), []).append(rates)
    lines = [_line(["workload", "GB", *columns, "forecast / marconi"]), _line(["---"] * (len(columns) + 3))]
    for (name, gb), seeds in cells.items():
        means = [f"{100 * fmean(r[c] for r in seeds):.1f}" for c in columns]
        ratio = fmean(r["forecast"] / r["marconi"] for r in seeds)
        lines.append(_line([name, f"{gb:g}", *means, f"{ratio:.2f}"]))
    return "\n".join(lines)


def ratio_table(rows: list[dict[str, Any]]) -> str:
    """Per workload: forecast against Marconi and the best of its variants, LRU margin, share of the gap, the target."""
    found: dict[str, list[Cell]] = {}
    for trace, _, rates, _ in groups(rows):
        found.setdefault(workload(trace), []).append(rates)
    head = [
        "workload",
        "cells",
        "/ marconi-paper",
        "target",
        "/ marconi",
        "/ best marconi",
        "/ lru",
        "worst points vs lru",
        "gap closed %",
    ]
    head += ["clairvoyant / marconi-paper", "bound / marconi-paper"]
    lines = [_line(head), _line(["---"] * len(head))]
    for name, cells in found.items():
        ratio = fmean(r["forecast"] / r["marconi-paper"] for r in cells)
        goal = TARGETS.get(name)
        gap = sum(r["clairvoyant"] - r["marconi"] for r in cells)
        closed = sum(r["forecast"] - r["marconi"] for r in cells) / gap
        lines.append(
            _line(
                [
                    name,
                    str(len(cells)),
                    f"{ratio:.2f}",
                    "" if goal is None else f">= {goal} {'met' if ratio >= goal else 'NOT met'}",
                    *(f"{fmean(r['forecast'] / r[one] for r in cells):.2f}" for one in ("marconi", "best marconi")),
                    f"{fmean(r['forecast'] / r['lru'] for r in cells):.2f}",
                    f"{100 * min(r['forecast'] - r['lru'] for r in cells):+.1f}",
                    f"{100 * closed:.0f}",
                    *(f"{fmean(r[top] / r['marconi-paper'] for r in cells):.2f}" for top in ("clairvoyant", "bound")),
                ]
            )
        )
    return "\n".join(lines)


def margin_table(rows: list[dict[str, Any]]) -> str:
    """Every cell of a robustness grid, with the distance of forecast to LRU in points."""
    columns = ("lru", "superseded", "marconi", "forecast", "clairvoyant", "bound")
    lines = [_line(["trace", "GB", *columns, "forecast - lru"]), _line(["---"] * (len(columns) + 3))]
    for trace, gb, rates, _ in groups(rows):
        margin = 100 * (rates["forecast"] - rates["lru"])
        lines.append(_line([trace, f"{gb:g}", *(f"{100 * rates[c]:.1f}" for c in columns), f"{margin:+.1f}"]))
    return "\n".join(lines)


def shift_table(rows: list[dict[str, Any]]) -> str:
    """Mean hit rate of each kind of phases over its seeds, and the worst seed of forecast against LRU, in points."""
    found: dict[str, list[Cell]] = {}
    for trace, _, rates, members in groups(rows):
        model = members[0]["model"]
        name = trace.partition("#")[0] + ("" if model == "marconi-7b" else f" ({model})")
        found.setdefault(name, []).append(rates)
    policies = list(dict.fromkeys(r["policy"] for r in rows))
    worst = ["worst of forecast - lru", "the same in pools"]
    lines = [_line(["workload", *policies, *worst]), _line(["---"] * (len(policies) + 3))]
    for name, cells in found.items():
        margins = [100 * min(r[p + "forecast"] - r[p + "lru"] for r in cells) for p in ("", "pools:")]
        means = [f"{100 * fmean(r[policy] for r in cells):.1f}" for policy in policies]
        lines.append(_line([name, *means, *(f"{margin:+.1f}" for margin in margins)]))
    return "\n".join(lines)


def hint_table(rows: list[dict[str, Any]]) -> str:
    """Mean hit rate by what clients say, the share of the gap to the clairvoyant row, the worst cell beside no word."""
    traces: dict[tuple[str, str, float], Cell] = {}
    for trace, gb, rates, _ in groups(rows):
        name, _, seed = trace.partition("#")
        kind, _, said = name.partition(",")
        mine = traces.setdefault((kind, seed, gb), {})
        mine |= {f"forecast, {said}" if said else policy: rate for policy, rate in rates.items()}
    found: dict[str, list[Cell]] = {}
    for (kind, _, _), rates in traces.items():
        found.setdefault(kind, []).append(rates)
    head = ["workload", "row", "hit rate %", "gap closed %", "worst points vs no word"]
    lines = [_line(head), _line(["---"] * len(head))]
    for kind, cells in found.items():
        gap = sum(r["clairvoyant"] - r["marconi-paper"] for r in cells)
        for row in [key for key in cells[0] if key != "best marconi"]:
            closed = 100 * sum(r[row] - r["marconi-paper"] for r in cells) / gap
            worst = f"{100 * min(r[row] - r['forecast'] for r in cells):+.1f}" if row.startswith("forecast,") else ""
            lines.append(_line([kind, row, f"{100 * fmean(r[row] for r in cells):.1f}", f"{closed:.0f}", worst]))
    return "\n".join(lines)


def cost_table(rows: list[dict[str, Any]]) -> str:
    """Seconds per replay and microseconds per request, by policy; and the two counts that must be zero."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "decision_us_mean" in row:
            found.setdefault(row["policy"], []).append(row)
    head = ["policy", "replays", "us/request mean", "p99 worst cell", "s/replay worst", "over capacity", "false hits"]
    lines = [_line(head), _line(["---"] * len(head))]
    for policy, mine in found.items():
        lines.append(
            _line(
                [
                    policy,
                    str(len(mine)),
                    f"{fmean(r['decision_us_mean'] for r in mine):.0f}",
                    f"{max(r['decision_us']['p99'] for r in mine):.0f}",
                    f"{max(r['seconds'] for r in mine):.1f}",
                    str(sum(r["over_capacity_requests"] for r in mine)),
                    str(sum(r["false_hits"] for r in mine)),
                ]
            )
        )
    return "\n".join(lines)


def figure_table(grid: str) -> str:
    """Hit rates of a figure's grid, one line per trace, model and capacity."""
    rows = result(grid)["rows"]
    policies = list(dict.fromkeys(r["policy"] for r in rows))
    lines = [_line(["trace", "model", "GB", *policies]), _line(["---"] * (len(policies) + 3))]
    for trace, gb, rates, members in groups(rows):
        lines.append(_line([trace, members[0]["model"], f"{gb:g}", *(f"{100 * rates[p]:.1f}" for p in policies)]))
    return "\n".join(lines)


def artifact_table() -> str:
    """The published artifact beside our policies of the same meaning."""
    head = ["trace", "GB", "artifact", "its hit %", "over capacity", "worst fill", "s", "ours", "hit %", "s", "equal %"]
    lines = [_line(head), _line(["---"] * len(head))]
    for r in result("artifact")["rows"]:
        gb = "unlimited" if r["capacity_gb"] >= 1000 else f"{r['capacity_gb']:g}"
        lines.append(
            _line(
                [
                    r["trace"],
                    gb,
                    r["artifact"],
                    f"{100 * r['artifact_token_hit_rate']:.1f}",
                    str(r["artifact_over_capacity_requests"]),
                    f"{r['artifact_worst_fill']:.2f}",
                    f"{r['artifact_seconds']:.1f}",
                    r["policy"],
                    f"{100 * r['token_hit_rate']:.1f}",
                    f"{r['seconds']:.1f}",
                    f"{100 * r['requests_with_equal_hits']:.1f}",
                ]
            )
        )
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


TABLES: dict[str, Callable[[], str]] = {
    "ratios": lambda: ratio_table(result("main")["rows"]),
    "main": lambda: main_table(result("main")["rows"]),
    "hints": lambda: hint_table(result("hints")["rows"]),
    "cost": lambda: cost_table(result("main")["rows"]),
    "robustness": lambda: margin_table(result("robustness")["rows"]),
    "short": lambda: margin_table(result("short")["rows"]),
    "shifts": lambda: shift_table(result("shifts")["rows"]),
    "long": lambda: cost_table(result("long")["rows"]),
    "artifact": artifact_table,
    **{name: partial(figure_table, name) for name in ("admission", "contention", "architecture", "arrivals")},
}


def fill_readme() -> None:
    """Replace what stands between `<!-- name -->` and `<!-- /name -->` by the table of that name."""
    path = HERE / "README.md"
    text = path.read_text()
    for name, table in TABLES.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if mark and end:
            with contextlib.suppress(FileNotFoundError):  # a grid that has not run keeps what stands there
                text = before + mark + table() + "\n" + end + after
    path.write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true", help="write them into README.md in place of printing them")
    if parser.parse_args().readme:
        fill_readme()
    else:
        for title, make in TABLES.items():
            print(f"{title}\n\n{make()}\n")
