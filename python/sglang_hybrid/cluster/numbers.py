"""What a router counts, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sglang_hybrid.cluster.status import PREFIX
from sglang_hybrid.routing.index import Reach

if TYPE_CHECKING:
    from sglang_hybrid.cluster.prompts import Pages
    from sglang_hybrid.cluster.workers import Workers

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)


class Numbers:
    """Counts of one router over `workers`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._registry = registry = CollectorRegistry()
        self.retries = Counter(PREFIX + "retries", "Requests that were sent to another worker.", registry=registry)
        self._seconds = Histogram(
            PREFIX + "seconds", "From a request's last byte to the choice of its worker.", registry=registry,
            buckets=_SECONDS,
        )  # fmt: skip
        self._prompt = Counter(PREFIX + "prompt_tokens", "Tokens of prompts that were known.", registry=registry)
        self._foretold = Counter(
            PREFIX + "foretold_tokens", "Tokens that the chosen worker was expected to have.", registry=registry
        )
        self._unknown = Counter(PREFIX + "unknown_prompts", "Requests that were sent by load alone.", registry=registry)
        labels = ["worker"]
        self._gauges = {
            name: Gauge(PREFIX + name, text, labels, registry=registry)
            for name, text in (
                ("healthy", "Whether the worker answers."),
                ("running", "Requests sent to the worker that have not ended."),
                ("waiting_tokens", "Prompt tokens to compute of those without a first token."),
            )
        }

    def routed(self, seconds: float, pages: Pages, reach: Reach) -> None:
        """A request got its worker."""
        self._seconds.observe(seconds)
        self._prompt.inc(pages.tokens)
        self._foretold.inc(reach.resume_tokens)
        self._unknown.inc(not pages.tokens and not pages.by_session)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        for worker in self._workers.all.values():
            for name, gauge in self._gauges.items():
                gauge.labels(worker.url).set(float(getattr(worker, name)))
        return generate_latest(self._registry)
