"""A report: the outcomes of a grid as a table, as JSON, and in words."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_hybrid.sim.answer import paragraph
from sglang_hybrid.sim.grid import is_ceiling
from sglang_hybrid.sim.metrics import Outcome
from sglang_hybrid.sim.outputs import unwritable
from sglang_hybrid.sim.segments.words import words

SCHEMA = "sglang-hybrid/simulate/1"


@dataclass(frozen=True)
class Report:
    """Outcomes in grid order."""

    outcomes: tuple[Outcome, ...]

    def panels(self) -> dict[tuple[str, str], list[Outcome]]:
        """Outcomes by trace and model, in order of appearance."""
        found: dict[tuple[str, str], list[Outcome]] = {}
        for o in self.outcomes:
            found.setdefault((o.trace, o.model), []).append(o)
        return found

    def as_json(self, about: dict[str, Any]) -> dict[str, Any]:
        """The report as one JSON object; `about` says how it was made."""
        cells = [o.as_row() for o in self.outcomes]
        return {"schema": SCHEMA, **about, "answers": self.answers(), "cells": cells}

    def write_json(self, path: Path, about: dict[str, Any]) -> None:
        """Write the report, replacing the file; raises ConfigError if it cannot be written."""
        text = json.dumps(self.as_json(about), indent=1) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise unwritable(path, error) from error

    def print(self, console: Console) -> None:
        """One table per trace and model, then the answers."""
        for trace, model in self.panels():
            console.print(self._table(trace, model))
        for line in self.answers():
            console.print(line, highlight=False)

    def answers(self) -> list[str]:
        """Per trace and model a paragraph on prefixes (the knee, what more memory brings, the best policy, the
        ceilings), and one on segments."""
        lines = []
        for (trace, model), outcomes in self.panels().items():
            lines += [f"{trace} on {model}: {said}" for said in (paragraph(outcomes), words(outcomes)) if said]
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
                name = f"[dim]{o.policy}[/dim]" if is_ceiling(o.policy) else o.policy
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
