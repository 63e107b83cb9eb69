"""Publishes our series in a scheduler process, under the labels that SGLang gives its own there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_hybrid.engine.series import Series

_labels: dict[str, str] | None = None


def learn_labels(context: Any, *_: Any, **__: Any) -> None:
    """Hooked behind the making of SGLang's collector: keep its labels where this rank is to publish.

    One rank of each group that decides alike does, so that sums over ranks count nothing twice: with tensor or
    pipeline parallelism the first, with data-parallel attention the first of every replica.
    """
    global _labels
    labels = {} if context.collector is None else {key: str(value) for key, value in context.collector.labels.items()}
    leads = context.is_stats_logging_rank and labels.get("pp_rank", "0") == "0"
    _labels = labels if labels and leads else None


def labels() -> dict[str, str] | None:
    """SGLang's labels of this process: model_name, engine_type and ranks; None where nothing is to be published."""
    return _labels


class Published:
    """A series as prometheus_client's metric; the methods take the values of its own labels, in its order.

    `registry` None is prometheus_client's own. Make it in a scheduler process only: SGLang chooses prometheus_client's
    multiprocess mode before its first import.
    """

    def __init__(self, series: Series, labels: Mapping[str, str], registry: Any) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge

        names, where = [*labels, *series.labels], REGISTRY if registry is None else registry
        self._shared = tuple(labels.values())
        self._told: dict[tuple[str, ...], float] = {}
        if series.kind == "counter":
            self._metric: Any = Counter(series.name.removesuffix("_total"), series.text, names, registry=where)
        else:
            self._metric = Gauge(series.name, series.text, names, registry=where, multiprocess_mode="mostrecent")

    def add(self, amount: float, *values: str) -> None:
        """Increase a counter; by 0 it becomes visible, so that its first increase is seen as one."""
        self._metric.labels(*self._shared, *values).inc(amount)

    def reach(self, total: float, *values: str) -> None:
        """Increase a counter to `total`, counted by somebody else since the start."""
        self.add(max(0.0, total - self._told.get(values, 0.0)), *values)
        self._told[values] = max(total, self._told.get(values, 0.0))

    def set(self, value: float, *values: str) -> None:
        """Set a gauge."""
        self._metric.labels(*self._shared, *values).set(value)
