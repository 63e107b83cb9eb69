"""What events cost the scheduler: processor time of a request's insertion, evictions and events, with and without them.

    python -m benchmarks.serving.event_cost [--requests 400] [--prompt 2048]

SGLang's real tree and pools with pages of 64, full, without a model, in one process that takes turns request by
request. Half of a prompt is shared with others. `none`: no events. `blocks`: SGLang's own events of KV. `states`: those
and ours. A request is its insertion with a state, the evictions that make room for it, and one batch of events taken
and packed as SGLang's publisher packs it (in a thread of its own, under the same interpreter lock).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import Any

import msgspec

from benchmarks import provenance

KINDS = ("none", "blocks", "states")
PAGE, KEPT, SHARED = 64, 64, 8
"""Tokens of a page, prompts that fit, prefixes that prompts begin with."""


class Load:
    """One cache, full."""

    def __init__(self, kind: str, prompt: int, seed: int) -> None:
        from tests.engine.tree import Tree

        self.tree = Tree("forecast", tokens=KEPT * prompt, states=KEPT, page_size=PAGE, events=kind)
        self.rng, self.prompt = random.Random(seed), prompt
        self.shared = [self._words(prompt // 2) for _ in range(SHARED)]
        self.encoder = msgspec.msgpack.Encoder()
        self.times: list[float] = []
        self.events = 0
        for _ in range(2 * KEPT):
            self.request()
        self.times, self.events = [], 0

    def _words(self, count: int) -> list[int]:
        return [self.rng.randrange(1 << 17) for _ in range(count)]

    def request(self) -> None:
        from sglang.srt.disaggregation.kv_events import KVEventBatch

        tree = self.tree
        tokens = [*self.rng.choice(self.shared), *self._words(self.prompt - self.prompt // 2)]
        tree.clock.advance(0.1)
        start = time.thread_time()
        assert tree.insert(tokens)
        events = tree.cache.take_events()
        if events:
            self.encoder.encode(KVEventBatch(ts=0.0, events=events))
        self.times.append(1e6 * (time.thread_time() - start))
        self.events += len(events)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    head = provenance.head("sglang", "torch")
    loads = {kind: Load(kind, options.prompt, options.seed) for kind in KINDS}
    for _ in range(options.requests):
        for load in loads.values():
            load.request()
    none = statistics.fmean(loads["none"].times)
    rows: list[dict[str, Any]] = []
    for kind, load in loads.items():
        mean = statistics.fmean(load.times)
        rows.append(
            {
                "events": kind,
                "events_per_request": round(load.events / options.requests, 2),
                "p50_us": round(statistics.median(load.times), 1),
                "mean_us": round(mean, 1),
                "more_us": round(mean - none, 1),
            }
        )
        print(rows[-1], flush=True)
    print(provenance.write("serving", "event-cost", {**head, **vars(options), "page_tokens": PAGE, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
