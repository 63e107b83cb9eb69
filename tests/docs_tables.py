"""The parts of the documents that are written from the code: `python -m tests.docs_tables` writes them anew."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

import yaml

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.engine.doctor.status import ADVICE
from sglang_hybrid.engine.launch import flags
from sglang_hybrid.engine.series import EVENTS, SERIES
from sglang_hybrid.prefix.misses import REASONS

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"(?<=<!-- table: )(\w+) -->\n.*?(?=<!-- end -->)", re.DOTALL)


def tables() -> dict[str, str]:
    """Markdown by the name that a document calls for as `<!-- table: NAME -->`."""
    alerts = yaml.safe_load((ROOT / "docker/alerts.yml").read_text())["groups"][0]["rules"]
    return {
        "reasons": _table("reason", "the token was computed because", "what to do", rows=(
            (f"`{reason}`", text, ADVICE[reason]) for reason, text in REASONS.items()
        )),
        "series": _table("series", "type", "labels of its own", "unit", "meaning", rows=(
            (f"`{each.name}`", each.kind, ", ".join(each.labels), each.unit, each.text) for each in SERIES
        )),
        "events": _table("event", "counts", rows=((f"`{event}`", text) for event, text in EVENTS.items())),
        "alerts": _table("alert", "severity", "what to do", rows=(
            (rule["alert"], rule["labels"]["severity"], " ".join(rule["annotations"]["description"].split()))
            for rule in alerts
        )),
    }  # fmt: skip


def _table(*head: str, rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(cells)} |" for cells in rows)]
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """A document with its tables as the code has them now."""
    known = tables()
    return _BLOCK.sub(lambda block: f"{block[1]} -->\n{known[block[1]]}", text)


def settings() -> str:
    """deploy/hybrid.yaml: every setting with what it is for, at its default."""
    lines = [
        "# Every setting of sglang-hybrid at its default:  --hybrid-config deploy/hybrid.yaml",
        "# A flag --hybrid-<name-with-dashes> overrides its line. SGLang's settings go into a file for its --config.",
    ]
    helps = {action.dest: str(action.help) for action in flags.hybrid_parser()._actions}
    for option in dataclasses.fields(HybridConfig):
        text = helps[option.name].rpartition(" (default:")[0].replace("%%", "%")
        choices = f" ({', '.join(option.metadata['choices'])})" if option.metadata["choices"] else ""
        value = '""' if option.default == "" else option.default
        lines += ["", *(f"# {line}" for line in textwrap.wrap(text + choices, 116)), f"{option.name}: {value}"]
    return "\n".join(lines) + "\n"


def documents() -> dict[Path, str]:
    """What each document that is written from the code should hold."""
    pages = {path: filled(path.read_text("utf-8")) for path in sorted((ROOT / "docs").glob("*.md"))}
    return {
        **{path: text for path, text in pages.items() if "<!-- table: " in text},
        ROOT / "deploy/hybrid.yaml": settings(),
    }


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text, "utf-8")
