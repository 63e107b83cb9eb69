"""The model card: what a reader is, how it came to be and how well it reads, written from what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_hybrid.demo.reader import questions

Counts = Mapping[str, list[int]]

_WHAT = {
    "reader-gdn": "three layers of the gated delta rule to one of full attention, in the layout of Qwen3.5",
    "reader-mamba2": "Mamba-2 and full attention side by side in each layer, in the layout of Falcon-H1",
}
_TEXT = """# {model}

A small hybrid language model for demonstrations and measurements: {what}. {parameters:,} parameters, {pieces} pieces,
bfloat16 values. It reads documents of a made-up world in simple English and answers questions about them. It knows
nothing else.

## Training

Documents and questions are generated (`sglang_hybrid.demo.reader`). {tokens:,} tokens, {minutes:.0f} minutes on
{machine} ({note}), {versions}.

{trainings}

{curve}

## Evaluation

Names, sentence forms and question forms that training never saw: pairs of known parts of a name, and pairs of a known
opening and a known clause. An answer counts if every token of it is right, its stop token included. In brackets:
Wilson's 95 % interval. "Seen forms" are those of training, with unseen names.

{table}
{drafting}"""

_DRAFTING = """
## Drafting

A head of {parameters:,} parameters beside the model drafts for it (`--speculative-algorithm NEXTN`). It was trained on
{tokens:,} tokens of the same language in {minutes:.0f} minutes; the model itself did not change.

    python -m sglang_hybrid.demo.train_head --out DIR --steps {steps} --seed {seed} --publish  # commit {commit}

Shares of drafts of {drafted} tokens whose first, first two, ... tokens are what the model says, at each place of an
answer; and the tokens of a pass over the model, its own one included. Greedy, held-out names and forms.

| text | answers' places | {heads} | tokens of a pass |
|---|---{line}|---|
{rows}
"""


def row(kind: str, right: int, count: int) -> dict[str, Any]:
    from sglang_hybrid.demo.reader.evaluation import interval

    low, high = interval(right, count)
    share = round(right / count, 4) if count else None
    return {
        "kind": kind,
        "right": right,
        "questions": count,
        "share": share,
        "low": round(low, 4),
        "high": round(high, 4),
    }


def evaluated(length: int, forms: str, counts: Counts) -> dict[str, Any]:
    """One evaluation: rows by kind and of all."""
    rows = [row(kind, *counts[kind]) for kind in questions.ALL if kind in counts]
    total = [sum(counts[kind][i] for kind in counts) for i in (0, 1)]
    return {"length": length, "forms": forms, "rows": [*rows, row("all", *total)]}


def write(folder: Path, content: dict[str, Any]) -> None:
    """Write `content` as <model>.json, and as text for people as <model>.md."""
    model = content["model"]
    (folder / f"{model}.json").write_text(json.dumps(content, indent=1) + "\n")
    head = content["head"]
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    text = _TEXT.format(
        **{name: content[name] for name in ("model", "parameters", "pieces", "tokens", "note")},
        what=_WHAT[model],
        minutes=content["seconds"] / 60,
        machine=head["machine"],
        trainings="\n".join(_command(model, number, one) for number, one in enumerate(content["trainings"])),
        versions=versions,
        curve=_curve(content["curve"]),
        table=_table(content["evaluations"]),
        drafting=_drafting(content["drafting"]) if "drafting" in content else "",
    )
    (folder / f"{model}.md").write_text(text)


def _drafting(entry: dict[str, Any]) -> str:
    rows = [
        f"| {row['text']} | {row['places']:,} | {' | '.join(f'{share:.0%}' for share in row['shares'])} "
        f"| {row['length']:.2f} |"
        for row in entry["accepted"]
    ]
    drafted = len(entry["accepted"][0]["shares"])
    return _DRAFTING.format(
        **{name: entry[name] for name in ("parameters", "tokens", "steps", "seed", "commit")},
        minutes=entry["seconds"] / 60,
        drafted=drafted,
        heads=" | ".join(map(str, range(1, drafted + 1))),
        line="|---" * drafted,
        rows="\n".join(rows),
    )


def _command(model: str, number: int, training: dict[str, Any]) -> str:
    begin = " --from-published" if number else ""
    options = f"--model {model} --out DIR --steps {training['steps']} --seed {training['seed']}{begin}"
    end = ", half way to its end" if training.get("halfway") else ""
    return f"    python -m sglang_hybrid.demo.train {options}  # commit {training['commit']}{end}"


def _curve(points: list[dict[str, Any]]) -> str:
    lines = [
        "| step | million tokens | loss | tokens asked at | held-out accuracy, mean of the kinds |",
        "|---" * 5 + "|",
    ]
    every = max(1, len(points) // 12)
    for point in points[::-1][::every][::-1]:
        shares = list(point["accuracy"].values())
        mean = sum(shares) / len(shares) if shares else 0.0
        begun = f"| {point['step']:,} | {point['tokens'] / 1e6:.2f} | {point['loss']:.3f} "
        lines.append(f"{begun}| {point['length']} | {mean:.0%} |")
    return "\n".join(lines)


def _table(evaluations: list[dict[str, Any]]) -> str:
    names = {"held": "unseen forms", "train": "seen forms"}
    heads = [f"{one['length']:,} tokens, {names[one['forms']]}" for one in evaluations]
    lines = ["| kind | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for kind in (*questions.ALL, "all"):
        cells = [next((_cell(r) for r in one["rows"] if r["kind"] == kind), "") for one in evaluations]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: dict[str, Any]) -> str:
    if not found["questions"]:
        return ""
    low, high = 100 * found["low"], 100 * found["high"]
    return f"{100 * found['share']:.1f} % [{low:.1f}, {high:.1f}], n = {found['questions']}"
