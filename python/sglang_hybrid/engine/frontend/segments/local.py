"""What an HTTP process knows of its own server without asking the scheduler: what other servers ask for first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from sglang_hybrid.engine.cache import requests
from sglang_hybrid.engine.segments import parcels

MOST_NAMES = 100_000
_SPARE = 1_024
_SHARE = 0.3
"""Of the newest measurement in a mean."""
_LASTS_S = 600.0

Tenant = dict[str, str]
"""`extra_key` and `cache_salt`, as far as a request has them."""


def name(ids: Sequence[int], tenant: Tenant) -> str:
    """What a segment is known by among servers, however each of them calls its model."""
    return parcels.name(ids, requests.namespace(SimpleNamespace(**tenant))).hex()


class Mean:
    """A mean of measurements that forgets old ones. A slow one must not last: who is avoided is not measured again."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._last, self._value = now, 0.0, 0.0

    @property
    def value(self) -> float | None:
        """None where nothing was measured lately."""
        return self._value if self._last and self._now() < self._last + _LASTS_S else None

    def add(self, measured: float) -> None:
        """Another measurement."""
        before = self.value
        self._value = measured if before is None else before + _SHARE * (measured - before)
        self._last = self._now()


class Local:
    """The segments that came by, by name, the tokens that wait, and the seconds that a token of a segment takes."""

    def __init__(self) -> None:
        self.pace = Mean()
        self._names: OrderedDict[str, None] = OrderedDict()
        self._waiting: dict[str, int] = {}
        self._most = _SPARE

    def sight(self, name: str) -> None:
        """A request has this segment: it will be kept, as far as anybody knows here."""
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > MOST_NAMES:
            self._names.popitem(last=False)

    def has(self, name: str) -> bool:
        """Whether it is likely kept; asking the scheduler would take as long as its pass."""
        return name in self._names

    def forget(self) -> None:
        """The cache was emptied."""
        self._names.clear()

    def begin(self, manager: Any, rid: str, tokens: int) -> None:
        """The request `rid` goes to the scheduler, with `tokens` to compute."""
        self._waiting[rid] = tokens
        if len(self._waiting) > self._most:
            self.waiting(manager)
            self._most = 2 * len(self._waiting) + _SPARE

    def waiting(self, manager: Any) -> int:
        """Tokens of requests that have no first token yet."""
        states = manager.rid_to_state
        for rid in [rid for rid in self._waiting if not _begins(states.get(rid))]:
            del self._waiting[rid]
        return sum(self._waiting.values())


def _begins(state: Any) -> bool:
    return state is not None and not state.finished and not state.time_stats.first_token_time
