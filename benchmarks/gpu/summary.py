"""One page: what a day on a GPU proved, what failed, and what was not run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS
from benchmarks.kernels import summary as kernels

HIT_SLACK, NOISE_FACTOR = 0.01, 3.0
"""A hit may lie three times as far from a cold answer as two cold ones lie apart, and a hundredth of a nat beyond."""


def page(out: Path, ends: dict[str, str], rehearsed: bool) -> str:
    """The page for the results below `out`; `ends` says how each part that was run ended."""
    lines = ["# A rehearsal on the CPU: no figure here is a GPU's" if rehearsed else "# On a GPU", ""]
    for name, part in PARTS.items():
        lines += [f"## {name}: {part.title}", "", f"{ends.get(name, 'not run')}", ""]
        file = out / (part.rehearsed if rehearsed and part.rehearsed else part.result)
        if name not in ends or not file.is_file():
            continue
        result = json.loads(file.read_text())
        if not any("commit" in line for line in lines):
            lines[1:1] = ["", f"commit {result.get('commit')}, {result.get('machine')}, {result.get('date')}"]
        lines += [*_VERDICTS[name](result), ""]
    return "\n".join(lines)


def servers(result: dict[str, Any]) -> Iterator[str]:
    """A table of the servers, and a verdict on each."""
    found = result["servers"]
    yield "| server | hit rate | TTFT p50 | p95 | later turns p50 | p95 | decode tokens/s | verdict |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for name, of in found.items():
        cells = ["-"] * 6
        if load := of.get("load"):
            cells[0] = f"{100 * load['hit_rate']:.1f} %"
            keys = ("ttft_p50_s", "ttft_p95_s", "later_turns_ttft_p50_s", "later_turns_ttft_p95_s")
            cells[1:5] = [f"{1000 * load[key]:.0f} ms" for key in keys]
        if "decode" in of:
            cells[5] = f"{of['decode']:.0f}"
        yield f"| {name} | {' | '.join(cells)} | {verdict(of)} |"


def verdict(of: dict[str, Any]) -> str:
    """In words: what of this server is proven."""
    if "error" in of:
        return "FAILED: " + of["error"].splitlines()[0][:160]
    said = []
    if equality := of.get("equality"):
        noise, hit = equality["cold_beside_cold_in_a_batch"], equality["hit_beside_cold"]
        right = hit["p95"] <= NOISE_FACTOR * noise["p95"] + HIT_SLACK and equality["hit_tokens"] > 0
        said.append(
            f"{'hits equal cold' if right else 'HITS DIFFER FROM COLD'} (log-probability p95 {hit['p95']:.4f}, "
            f"batches {noise['p95']:.4f}; {equality['hit_tokens']} tokens hit)"
        )
    if counted := of.get("synchronisations"):
        said.append(f"{counted['all']} synchronisations in {counted['requests']} requests, {counted['ours']} ours")
    if read := of.get("reading"):
        said.append(f"{read['right']} of {read['answers']} answers of the embedded reader right")
    if composed := of.get("composed"):
        marked, plain = composed["marked"], composed["unmarked"]
        said.append(
            f"{marked['right']} of {marked['questions']} answers over segments right, {plain['right']} without "
            f"({marked['segment_tokens']} tokens reused)"
        )
    if held := of.get("contention"):
        later = held["later_turns"]
        said.append(
            f"agents hit {100 * held['hit_rate']:.1f} %, first token p50 {1000 * held['ttft_p50_s']:.0f} ms, p95 "
            f"{1000 * held['ttft_p95_s']:.0f}, later turns {1000 * later['ttft_p95_s']:.0f}"
        )
    if grown := of.get("growth"):
        said.append("finite after moving memory" if grown["finite"] else "NOT FINITE after moving memory")
    return "; ".join(said) or "measured"


def driver(result: dict[str, Any]) -> Iterator[str]:
    """Which questions have an answer; the figures are in the raw result."""
    failed = result["failed"]
    yield f"{len(result['result']) - len(failed)} of {len(result['result'])} questions answered"
    yield from (f"- NOT {name}: {result['result'][name]['failed'][:160]}" for name in failed)


def operations(result: dict[str, Any]) -> Iterator[str]:
    """One line for each operation."""
    yield from (f"    {line}" for line in kernels.overview(result["operations"]))


def races(result: dict[str, Any]) -> Iterator[str]:
    """What each tool found, and how often a bit was wrong without one."""
    yield from (f"- {tool}: {found['status']}" for tool, found in result["tools"].items())
    yield f"- {result['wrong_rounds']} of {result['rounds']} rounds with a wrong bit"


_VERDICTS = {"driver": driver, "kernels": operations, "servers": servers, "elastic": servers, "races": races}
