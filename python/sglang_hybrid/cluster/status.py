"""`sglang-hybrid doctor --url` of a router: its workers, and how well it knows what they hold."""

from __future__ import annotations

import re

from sglang_hybrid.engine.doctor.installation import Finding

PREFIX = "sglang_hybrid_router_"
_SERIES = re.compile(rf'^{PREFIX}(\w+)(?:\{{worker="(.*)"\}})? (\S+)$', re.MULTILINE)

MANY_UNKNOWN = 0.1
"""Share of prompts sent by load alone, from which on something is wrong with the workers."""


def describe(page: str) -> list[Finding]:
    """One finding per line of a router's metrics `page`; none if it is another server's."""
    alone: dict[str, float] = {}
    by_worker: dict[str, dict[str, float]] = {}
    for name, worker, value in _SERIES.findall(page):
        if worker:
            by_worker.setdefault(worker, {})[name] = float(value)
        else:
            alone[name] = float(value)
    if not alone:
        return []
    requests, prompt = alone["seconds_count"], alone["prompt_tokens_total"]
    unknown, retries = alone["unknown_prompts_total"], alone["retries_total"]
    share = alone["foretold_tokens_total"] / prompt if prompt else 0.0
    doubt = "see the router's log; workers need --hybrid-state-events published (docs/cluster.md)"
    return [
        *(_worker(url, numbers) for url, numbers in by_worker.items()),
        Finding("requests", f"{requests:,.0f} sent to a worker, {retries:,.0f} of them to another one than the first"),
        Finding("foretold", f"{100 * share:.1f} % of {prompt:,.0f} prompt tokens were expected to come from a cache"),
        Finding(
            "unknown prompts",
            f"{unknown:,.0f} requests were sent by load alone",
            doubt if unknown > MANY_UNKNOWN * max(requests, 1.0) else None,
        ),
        Finding("more", "ask a worker itself what its cache does: sglang-hybrid doctor --url WORKER"),
    ]


def _worker(url: str, numbers: dict[str, float]) -> Finding:
    healthy = bool(numbers["healthy"])
    return Finding(
        url.removeprefix("http://"),
        f"{numbers['running']:,.0f} requests, {numbers['waiting_tokens']:,.0f} prompt tokens to compute",
        None if healthy else f"it is out; GET /workers of the router says why: {url}",
    )
