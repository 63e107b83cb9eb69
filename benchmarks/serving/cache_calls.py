"""What the cache costs the scheduler: a request's calls over SGLang's real tree and pools, by number of leaves.

    python -m benchmarks.serving.cache_calls [--leaves 100 1000 10000 40000]

Ours (forecast) beside both cores of stock SGLang, without a model, in one process that takes turns request by request.
Every call a scheduler makes for one request is timed, in microseconds of processor time of one thread:
`match` (with the copied state, admission and the lock), `alloc` (the row, the state and the KV, which is full),
`plan` (our hook when a prefill batch is put together: what to checkpoint, what the history learns), `insert` (the
prompt) and `finish` (the answer: its KV and its insertion). Half of the requests continue an earlier one, the others
are new below a prefix that a hundred share. Of as many requests more, `decisions` is what the questions to
`prefix.Decisions` take, and `without` what is left of those requests: where the cost of decisions ends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

KINDS = {"hybrid": ("forecast", "python"), "stock python": (None, "python"), "stock rust": (None, "rust")}
STAGES = ("match", "alloc", "plan", "insert", "finish")
SHARED, ASKED, ANSWER, TURNS = 128, 48, 16, 4
"""Tokens of a shared prefix, of what a turn adds to it and of its answer; turns of a conversation."""
WARM = 3000
"""Requests before the first that is timed: a server has learned what is used again, and does so ever more rarely."""


class Timed:
    """Decisions whose questions are timed, in microseconds of processor time since `spent_us` was set to 0."""

    def __init__(self, decisions: Any) -> None:
        self.decisions, self.spent_us = decisions, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.decisions, name)
        if not callable(found):
            return found

        def ask(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return found(*args, **kwargs)
            finally:
                self.spent_us += 1e6 * (time.thread_time() - begin)

        setattr(self, name, ask)  # from now on without this function
        return ask


class Load:
    """One kind of cache with its KV full; requests of the same distribution for every kind."""

    def __init__(self, kind: str, leaves: int) -> None:
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = KINDS[kind][1]
        from tests.engine.tree import Tree

        self.rng, self.number, self.leaves = random.Random(1), 0, leaves
        tokens = leaves * ASKED + (leaves // 100 + 2) * SHARED  # fewer than the states could use: KV is short too
        context = SHARED + TURNS * (ASKED + ANSWER) + 8
        self.tree = Tree(KINDS[kind][0], tokens=tokens, states=leaves + 8, context=context)
        self.sequences: list[list[int]] = []
        self.times: dict[str, list[float]] = {name: [] for name in (*STAGES, "request")}
        while self.number < WARM or self.tree.slots.available_size() > SHARED + TURNS * (ASKED + ANSWER):
            self.request()
        for spans in self.times.values():
            spans.clear()

    def share(self, requests: int) -> dict[str, list[float]]:
        """What the decisions of `requests` take, and the rest of their calls."""
        coordinator = self.tree.coordinator
        timed = coordinator.decisions = coordinator.memory.decisions = Timed(coordinator.decisions)
        coordinator.victims._decisions = timed
        found: dict[str, list[float]] = {"decisions": [], "without": []}
        for _ in range(requests):
            timed.spent_us = 0.0
            self.request()
            found["decisions"].append(timed.spent_us)
            found["without"].append(self.times["request"][-1] - timed.spent_us)
        return found

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(1 << 20) for _ in range(count)]

    def prompt(self) -> list[int]:
        known = self.rng.choice(self.sequences) if self.number % 2 and self.sequences else []
        if not known or len(known) > SHARED + (TURNS - 1) * (ASKED + ANSWER):
            known = [1 << 21 | self.rng.randrange(self.leaves // 100 + 1)] * SHARED
        return known + self.words(ASKED)

    def request(self) -> None:
        """Everything a scheduler asks the cache for one request."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.allocation import alloc_req_slots, alloc_token_slots
        from sglang.srt.mem_cache.common import release_kv_cache
        from sglang.srt.sampling.sampling_params import SamplingParams

        tree, coordinator, prompt, answer = self.tree, self.tree.coordinator, self.prompt(), self.words(ANSWER)
        cache, rows = tree.cache, tree.rows
        tree.clock.advance(0.1)
        self.number += 1
        req = Req(str(self.number), "", array("q", prompt), SamplingParams(max_new_tokens=ANSWER))
        marks = [time.thread_time()]
        req.init_next_round_input(cache)
        if coordinator is not None:
            assert coordinator.memory.room_for(SimpleNamespace(can_run_list=[]), req)
        req.lock_receipt = cache.inc_lock_ref(req.last_node).to_dec_params()
        marks.append(time.thread_time())
        start, end = len(req.prefix_indices), len(prompt)
        req.set_extend_range(start, end)
        (row,) = alloc_req_slots(rows, [req], cache)
        slots = alloc_token_slots(cache, end - start)
        rows.write((row, slice(0, start)), req.prefix_indices)
        rows.write((row, slice(start, end)), slots)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        marks.append(time.thread_time())
        if coordinator is not None:
            coordinator.plan(SimpleNamespace(reqs=[req], prefix_lens=[start], extend_lens=[end - start]))
        marks.append(time.thread_time())
        if coordinator is not None:  # the forward pass
            for checkpoint in req.sglang_hybrid.planned:
                checkpoint.written = True
        asked = time.thread_time()
        cache.cache_unfinished_req(req)
        marks.append(marks[-1] + time.thread_time() - asked)
        req.output_ids.extend(answer)
        asked = time.thread_time()
        rows.write((row, slice(end, end + ANSWER)), alloc_token_slots(cache, ANSWER))
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end + ANSWER
        release_kv_cache(req, cache)
        marks.append(marks[-1] + time.thread_time() - asked)
        for name, begin, done in zip(STAGES, marks, marks[1:], strict=False):
            self.times[name].append(1e6 * (done - begin))
        self.times["request"].append(1e6 * (marks[-1] - marks[0]))
        known = prompt + answer
        if len(self.sequences) < self.leaves:
            self.sequences.append(known)
        else:
            self.sequences[self.rng.randrange(self.leaves)] = known


def measure(leaves: int, requests: int) -> list[dict[str, Any]]:
    """Median, mean and 99th percentile of every kind of cache on trees of `leaves`; in this process."""
    loads = {kind: Load(kind, leaves) for kind in KINDS}
    for _ in range(requests):
        for load in loads.values():
            load.request()
    rows = []
    for kind, load in loads.items():
        spans = {name: span(times) for name, times in load.times.items()}
        states, tokens = load.tree.held()
        rows.append({"kind": kind, "leaves": leaves, "states": states, "tokens": tokens, **spans})
        if load.tree.coordinator is not None:
            rows[-1] |= {name: span(times) for name, times in load.share(requests).items()}
    return rows


def span(times: list[float]) -> dict[str, float]:
    """Median, mean and 99th percentile."""
    ordered = sorted(times)
    return {
        "p50_us": statistics.median(ordered),
        "mean_us": statistics.fmean(ordered),
        "p99_us": ordered[int(0.99 * len(ordered))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs="+", default=[100, 1000, 10_000, 40_000])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--one", action="store_true", help="measure the first number of leaves here and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.leaves[0], options.requests)))
        return
    from benchmarks import provenance
    from sglang_hybrid.prefix import FORM

    rows = []
    for leaves in options.leaves:
        command = [sys.executable, "-m", "benchmarks.serving.cache_calls", "--one", "--leaves", str(leaves)]
        command += ["--requests", str(options.requests)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        rows += json.loads(done.stdout.splitlines()[-1])
        for row in rows[-len(KINDS) :]:
            print(
                row["kind"],
                leaves,
                {k: (round(v["p50_us"]), round(v["mean_us"])) for k, v in row.items() if isinstance(v, dict)},
                flush=True,
            )
    head = provenance.head("sglang", "torch", "sglang-hybrid")
    print(
        provenance.write(
            "serving", "cache-calls", {**head, "seed": 1, "requests": options.requests, "prefix": FORM, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
