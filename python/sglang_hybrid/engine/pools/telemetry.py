"""What elastic memory says of itself: Prometheus series and a line in the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from sglang_hybrid.engine.pools.arena import Arena
from sglang_hybrid.engine.publish import Published
from sglang_hybrid.engine.series import CALLS, ELASTIC, SERIES

logger = logging.getLogger(__name__)

_EXPORT_EVERY_S = 1.0


def figures(arena: Arena, counts: Counter[str]) -> dict[tuple[str, str], float]:
    """Every figure by (name, kind); kind is '' where both kinds share it. Times in seconds, memory in granules.

    `counts` are those of the cache's account: `memory_waits`, and `memory_evicted_<kind>`.
    """
    budget, pooled = arena.budget, arena.pooled
    found: dict[tuple[str, str], float] = {
        ("granule_bytes", ""): arena.sizing.granule_bytes,
        ("granules_budget", ""): budget.total,
        ("granules_pinned", ""): sum(pool.columns.column_granules for pool in budget.pools.values()),
        ("granules_resident", ""): pooled.committed_bytes // arena.sizing.granule_bytes,
        ("granules_used_max", ""): arena.most_used,
        ("granules_resident_max", ""): arena.most_mapped,
        ("transfers", ""): budget.transfers,
        ("waits", ""): counts["memory_waits"],
        ("reclaims", ""): pooled.reclaimed,
        ("granules_at_hand", ""): pooled.at_hand,
    }
    for name, supply in arena.supplies.items():
        census = supply.census()
        found["granules_used", name] = census["granules"]
        found["granules_unused", name] = census["free_granules"]
        found["fragmentation", name] = census["fragmentation"]
        found["evictions", name] = counts[f"memory_evicted_{name}"]
    for kind, meter in zip(CALLS, (arena.backing.mapped, arena.backing.unmapped, arena.grown), strict=True):
        found["calls", kind] = meter.calls
        found["granules_moved", kind] = meter.granules
        found["failures", kind] = meter.failed
        found["seconds", kind] = meter.total_s
        found["seconds_p50", kind] = meter.quantile(0.5)
        found["seconds_p99", kind] = meter.quantile(0.99)
        found["processor_seconds_p99", kind] = meter.processor_quantile(0.99)
    return found


class Telemetry:
    """Exports `figures` once a second, and logs them every `log_interval_s` seconds if they changed; 0 is never."""

    def __init__(self, arena: Arena, counts: Counter[str], log_interval_s: float,
                 export: Callable[[dict[tuple[str, str], float]], None] | None) -> None:  # fmt: skip
        self._arena = arena
        self._counts = counts
        self._export = export
        self._interval_s = log_interval_s
        self._exported_s = self._logged_s = -1e9
        self._line = ""

    def tick(self) -> None:
        """Called after every pass and while idle."""
        now = self._arena.clock()
        logs = self._interval_s and now - self._logged_s >= self._interval_s
        exports = self._export is not None and now - self._exported_s >= _EXPORT_EVERY_S
        if not logs and not exports:
            return
        found = figures(self._arena, self._counts)
        if exports and self._export is not None:
            self._exported_s = now
            self._export(found)
        if logs:
            self._logged_s = now
            line = summary(self._arena, found)
            if line != self._line:
                self._line = line
                logger.info(line)


def summary(arena: Arena, found: dict[tuple[str, str], float]) -> str:
    """`found` in one line."""
    total, granule_mib = found["granules_budget", ""], arena.sizing.granule_bytes / (1 << 20)
    kinds = ", ".join(
        f"{name} {found['granules_used', name]:.0f} ({100 * found['fragmentation', name]:.0f} % holes)"
        for name in arena.supplies
    )
    calls = ", ".join(
        f"{kind} {found['calls', kind]:.0f} (p99 {1e3 * found['seconds_p99', kind]:.2f} ms)" for kind in CALLS
    )
    return (
        f"memory: {kinds} of {total:.0f} granules of {granule_mib:.2f} MiB, resident "
        f"{found['granules_resident', '']:.0f}, most used {found['granules_used_max', '']:.0f}; {calls}; "
        f"{found['transfers', '']:.0f} granules changed kind, {found['waits', '']:.0f} waits"
    )


def exporter(labels: Mapping[str, str], registry: Any = None) -> Callable[[dict[tuple[str, str], float]], None]:
    """A function that publishes figures as Prometheus series under SGLang's `labels`."""
    published = {
        series.name.removeprefix(ELASTIC).removesuffix("_total"): (Published(series, labels, registry), series.kind)
        for series in SERIES
        if series.name.startswith(ELASTIC)
    }

    def export(found: dict[tuple[str, str], float]) -> None:
        for (name, kind), value in found.items():
            series, sort = published[name]
            tell = series.reach if sort == "counter" else series.set
            tell(value, *([kind] if kind else []))

    return export
