"""What the cache says of itself: Prometheus series, exported by SGLang's endpoint, and a line in the log."""

from __future__ import annotations

import logging
from collections import Counter as Counts
from collections.abc import Callable, Mapping
from typing import Any

from sglang_hybrid.engine.publish import Published
from sglang_hybrid.engine.series import CACHE_EVENTS, EVENTS, MISS_REQUESTS, MISS_TOKENS
from sglang_hybrid.prefix.misses import REASONS

logger = logging.getLogger(__name__)

_TRUSTED = 64
"""States that may be planned before one was written: requests are aborted, passes change shape."""

Tell = Callable[[str, int], None]
"""Gets a name and by how much its count grew."""


class Exported:
    """Counts misses and events in Prometheus, under SGLang's `labels`; every series is there from the start."""

    def __init__(self, labels: Mapping[str, str], registry: Any = None) -> None:
        self._tokens = Published(MISS_TOKENS, labels, registry)
        self._requests = Published(MISS_REQUESTS, labels, registry)
        self._events = Published(CACHE_EVENTS, labels, registry)
        for reason in REASONS:
            self._tokens.add(0, reason)
            self._requests.add(0, reason)
        for event in EVENTS:
            self._events.add(0, event)

    def miss(self, reason: str, tokens: int) -> None:
        """A request computes `tokens` for this reason."""
        self._tokens.add(tokens, reason)
        self._requests.add(1, reason)

    def event(self, name: str, amount: int) -> None:
        """One of EVENTS happened."""
        self._events.add(amount, name)


class Account:
    """What happened since the start, counted by name in `counts`; Prometheus and the log are told of it.

    `states` is SGLang's allocator of state slots. `on_miss` gets each reason of every request with its tokens,
    `on_event` each event. `log_interval_s`: seconds between lines in the log, of which there are none without
    requests; 0 is never.
    """

    def __init__(
        self,
        states: Any,
        log_interval_s: float = 0.0,
        on_miss: Tell | None = None,
        on_event: Tell | None = None,
    ) -> None:
        self.counts: Counts[str] = Counts()
        self._states = states
        self._on_miss = on_miss
        self._on_event = on_event
        self._interval_s = log_interval_s
        self._last_s: float | None = None
        self._then: Counts[str] = Counts()

    def request(self, prompt_tokens: int, hit_tokens: int, misses: dict[str, int], now: float) -> None:
        """The first pass of a request begins: `hit_tokens` of its prompt are skipped, the others missed."""
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += prompt_tokens
        self.counts["hit_tokens"] += hit_tokens
        for reason, count in misses.items():
            self.counts["miss_" + reason] += count
            if self._on_miss is not None:
                self._on_miss(reason, count)
        if self._interval_s:
            self._log(now)

    def event(self, name: str, amount: int = 1) -> None:
        """One of `series.EVENTS` happened."""
        if amount:
            self.counts[name] += amount
            if self._on_event is not None:
                self._on_event(name, amount)

    def planned(self) -> None:
        """A state inside a prefill is to be written; that none ever is must not go unsaid."""
        counts = self.counts
        self.event("planned")
        if counts["planned"] == _TRUSTED and not counts["written"]:
            logger.warning(
                "%d states inside prefills were planned and none was written: branch points and boundaries are lost. "
                "Report it with the start block; --linear-attn-prefill-backend triton or --disable-prefill-cuda-graph "
                "may help",
                _TRUSTED,
            )

    def _log(self, now: float) -> None:
        """One line of what happened since the last one, if it is time."""
        if self._last_s is None:
            self._last_s = now
        if now - self._last_s < self._interval_s:
            return
        new = self.counts - self._then
        self._last_s, self._then = now, self.counts.copy()
        logger.info(summary(new, self._states.size - self._states.available_size(), self._states.size))


def summary(counts: Counts[str], states_used: int, states: int) -> str:
    """`counts` in words: requests, hit rate, misses by reason, and what had to be given up."""
    prompt = max(1, counts["prompt_tokens"])
    missed = [(counts[f"miss_{reason}"], reason) for reason in REASONS if counts[f"miss_{reason}"]]
    reasons = ", ".join(f"{reason} {100 * count / prompt:.1f} %" for count, reason in sorted(missed, reverse=True))
    said = (
        f"cache: {counts['requests']} requests, {counts['prompt_tokens']:,} prompt tokens, "
        f"hit {100 * counts['hit_tokens'] / prompt:.1f} % (missed: {reasons or 'nothing'}); "
        f"states {states_used}/{states}, {counts['states_evicted']} evicted, {counts['refused']} not taken"
    )
    if not counts["segments_hits"] and not counts["segments_made"]:
        return said
    return (
        f"{said}; segments: {counts['segments_hits']} reused ({100 * counts['segments_reused_tokens'] / prompt:.1f} % "
        f"of the prompt tokens), {counts['segments_made']} made, {counts['segments_evicted']} evicted"
    )
