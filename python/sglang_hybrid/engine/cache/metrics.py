"""What the cache says of itself: Prometheus series, exported by SGLang's endpoint, and a line in the log."""

from __future__ import annotations

import logging
from collections import Counter as Counts
from collections.abc import Callable
from typing import Any

from sglang_hybrid.prefix.misses import REASONS

logger = logging.getLogger(__name__)

_TRUSTED = 64
"""States that may be planned before one was written: requests are aborted, passes change shape."""

MISSES = "sglang:mamba_cache_miss_tokens_total"
REQUESTS = "sglang:mamba_cache_miss_requests_total"


def miss_counter(enabled: bool) -> Callable[[int, dict[str, int]], None] | None:
    """A function of (hit tokens, misses by reason) that counts; None when metrics are off.

    Imports prometheus_client only now: SGLang has to choose its multiprocess mode before the first import.
    """
    if not enabled:
        return None
    from prometheus_client import Counter

    tokens = Counter(MISSES.removesuffix("_total"), "Prompt tokens computed, by the reason they missed.", ["reason"])
    missed = Counter(REQUESTS.removesuffix("_total"), "Requests with a missed token, by reason.", ["reason"])

    def count(hit_tokens: int, misses: dict[str, int]) -> None:
        for reason, amount in misses.items():
            tokens.labels(reason).inc(amount)
            missed.labels(reason).inc()

    return count


class Account:
    """What happened since the start, counted by name in `counts`; Prometheus and the log are told of it.

    `states` is SGLang's allocator of state slots. `on_misses` gets the hit tokens and the misses by reason of every
    request. `log_interval_s`: seconds between lines in the log, of which there are none without requests; 0 is never.
    """

    def __init__(
        self,
        states: Any,
        log_interval_s: float = 0.0,
        on_misses: Callable[[int, dict[str, int]], None] | None = None,
    ) -> None:
        self.counts: Counts[str] = Counts()
        self._states = states
        self._on_misses = on_misses
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
        if self._on_misses is not None:
            self._on_misses(hit_tokens, misses)
        if self._interval_s:
            self._log(now)

    def planned(self) -> None:
        """A state inside a prefill is to be written; that none ever is must not go unsaid."""
        counts = self.counts
        counts["planned"] += 1
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
    return (
        f"cache: {counts['requests']} requests, {counts['prompt_tokens']:,} prompt tokens, "
        f"hit {100 * counts['hit_tokens'] / prompt:.1f} % (missed: {reasons or 'nothing'}); "
        f"states {states_used}/{states}, {counts['states_evicted']} evicted, {counts['refused']} not taken"
    )
