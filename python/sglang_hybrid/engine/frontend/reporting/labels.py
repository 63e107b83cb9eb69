"""What clients put into the labels of metrics: names that the server has, and few priorities.

A name that the metrics do not have ends SGLang's HTTP process. For every priority that ever came it keeps some twenty
series, and the scheduler writes a part of them with every batch: with priorities that are times, without end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from sglang_hybrid.engine.frontend.validation.limits import require_key

PRIORITIES = 64
"""How many priorities have series of their own in one process; others count as none."""

_known: set[int] = set()


def keep_allowed(obj: Any, allowed: Collection[str] | None) -> None:
    """Leave of a request's labels those that the server allows, as SGLang does with those of a header."""
    given = getattr(obj, "custom_labels", None)
    if given:
        obj.custom_labels = {name: value for name, value in given.items() if name in (allowed or ())}
        for name, value in obj.custom_labels.items():
            require_key(value, f"the label {name}")


def count(counts: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook of QueueCount.from_reqs, in the scheduler: requests of each priority in a queue."""
    if counts.by_priority:
        few: dict[int | None, int] = {}
        for priority, number in counts.by_priority.items():
            name = _named(priority)
            few[name] = few.get(name, 0) + number
        counts.by_priority = few
    return counts


def collect(original: Callable[..., Any], manager: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of TokenizerManager.collect_metrics, which names the priority of a request."""
    priority = getattr(state.obj, "priority", None)
    if not manager.enable_priority_scheduling or _named(priority) == priority:
        return original(manager, state, *args, **kwargs)
    state.obj.priority = None
    try:
        return original(manager, state, *args, **kwargs)
    finally:
        state.obj.priority = priority


def _named(priority: int | None) -> int | None:
    if priority is not None and priority not in _known:
        if len(_known) >= PRIORITIES:
            return None
        _known.add(priority)
    return priority
