"""A report: the outcomes of a grid as a table, as JSON, and in one sentence per capacity which policy was best."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_hybrid.sim.grid import CEILINGS
from sglang_hybrid.sim.metrics import Outcome

SCHEMA = "sglang-hybrid/simulate/1"


@dataclass(frozen=True)
class Report:
    """Outcomes in grid order."""

    outcomes: tuple[Outcome, ...]

    def groups(self) -> Iterator[tuple[tuple[str, str, float], list[Outcome]]]:
        """(trace, model, capacity) with its outcomes, in order of appearance."""
        found: dict[tuple[str, str, float], list[Outcome]] = {}
        for o in self.outcomes:
            found.setdefault((o.trace, o.model, o.capacity_gb), []).append(o)
        yield from found.items()

    def best(self) -> list[tuple[str, str, float, Outcome]]:
        """Per trace, model and capacity the policy that skipped most input tokens; ties go to the earlier column."""
        rows = []
        for (trace, model, gb), outcomes in self.groups():
            policies = [o for o in outcomes if o.policy not in CEILINGS]
            if policies:
                rows.append((trace, model, gb, max(policies, key=lambda o: o.token_hit_rate)))
        return rows

    def as_json(self, about: dict[str, Any]) -> dict[str, Any]:
        """The report as one JSON object; `about` says how it was made."""
        return {"schema": SCHEMA, **about, "cells": [o.as_row() for o in self.outcomes]}

    def write_json(self, path: Path, about: dict[str, Any]) -> None:
        """Write the report, replacing the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(about), indent=1) + "\n", encoding="utf-8")

    def print(self, console: Console) -> None:
        """One table per trace and model, then the verdict."""
        seen: list[tuple[str, str]] = []
        for (trace, model, _), _outcomes in self.groups():
            if (trace, model) not in seen:
                seen.append((trace, model))
                console.print(self._table(trace, model))
        for line in self.verdict():
            console.print(line)

    def verdict(self) -> list[str]:
        """One line per trace, model and capacity: the best policy, its hit rate, and what a clairvoyant would get."""
        ceiling = {(o.trace, o.model, o.capacity_gb): o for o in self.outcomes if o.policy == "clairvoyant"}
        lines = []
        for trace, model, gb, best in self.best():
            line = (
                f"{trace} on {model}, {gb:g} GB: best is {best.policy} with {best.token_hit_rate:.1%} of input tokens"
            )
            above = ceiling.get((trace, model, gb))
            lines.append(line + (f" (clairvoyant {above.token_hit_rate:.1%})" if above else ""))
        return lines

    def _table(self, trace: str, model: str) -> Table:
        table = Table(title=f"{trace} on {model}", title_justify="left", padding=(0, 1), collapse_padding=True)
        table.add_column("GB", justify="right", no_wrap=True)
        table.add_column("policy", no_wrap=True)
        for column in _COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        last: float | None = None
        for o in self.outcomes:
            if (o.trace, o.model) == (trace, model):
                if last is not None and o.capacity_gb != last:
                    table.add_section()
                name = f"[dim]{o.policy}[/dim]" if o.policy in CEILINGS else o.policy
                table.add_row("" if o.capacity_gb == last else f"{o.capacity_gb:g}", name, *_cells(o.fields))
                last = o.capacity_gb
        return table


_COLUMNS = (
    "tokens\nhit %",
    "FLOPs\nsaved %",
    "uncached\np50/p95",
    "TTFT ms\np5/p50/p95",
    "peak\nGB",
    "us per\nrequest",
)


def _cells(fields: dict[str, Any]) -> Sequence[str]:
    uncached, ttft = fields.get("uncached_tokens", {}), fields.get("ttft_ms", {})
    return (
        f"{100 * fields['token_hit_rate']:.1f}",
        f"{100 * fields['flop_hit_rate']:.1f}" if "flop_hit_rate" in fields else "",
        "/".join(f"{uncached[q]:.0f}" for q in ("p50", "p95")) if uncached else "",
        "/".join(f"{ttft[q]:.0f}" for q in ("p5", "p50", "p95")) if ttft else "",
        f"{fields['peak_gb']:.2f}" if "peak_gb" in fields else "",
        f"{fields['decision_us_mean']:.0f}" if "decision_us_mean" in fields else "",
    )
