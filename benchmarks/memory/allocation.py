"""What alloc and free cost beside SGLang's stock allocators on the CPU while no memory moves; run by host.py."""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from sglang_hybrid.memory.backing import LedgerBacking
from sglang_hybrid.memory.budget import Budget
from sglang_hybrid.memory.layout import Layout, Planes

GRANULE = 2 << 20
POOLS = (8192, 65536, 262144, 1048576)
COLUMNS = {
    "pairs": "one allocation and one free of a request's pages",
    "churn": "a request of random length ends and another starts, half the pool in use; requests end in random order",
    "stock_us, ours_us": "median microseconds, measured in turns",
    "stock_mean_us, ours_mean_us": "the same sequence of calls, mean: includes the sorts that come unasked",
    "asked_us": "ours when a question about granules follows every free, so that loose pages are sorted every time",
    "sorting": "microseconds to sort as many loose pages as there can be before they are sorted unasked, shuffled",
    "ratio": "ours over stock",
    "free_pages": "whole: a sixteenth in use, the rest in one piece; scattered: a random quarter in use",
}


class Ours:
    """A pool behind the interface of SGLang's allocators: int64 slots in a tensor, out and in."""

    def __init__(self, pool_tokens: int, page: int, scattered: bool) -> None:
        layout = Layout("kv", (Planes("kv", 24, 1024),), pool_tokens, GRANULE, page)
        self.budget = Budget(layout.columns * 24 * GRANULE, GRANULE, LedgerBacking(layout.plane_granules))
        self.pool = self.budget.add_pool(layout)
        self.pool.free(self.pool.alloc(layout.pages))  # everything is mapped from here on
        self.pool.sort()
        self._page = page
        self._offsets = torch.arange(page)
        occupy(self, pool_tokens, page, scattered)

    def alloc(self, tokens: int) -> torch.Tensor:
        if self._page == 1:
            return torch.from_numpy(self.pool.alloc(tokens))
        pages = torch.from_numpy(self.pool.alloc(tokens // self._page))
        return (pages[:, None] * self._page + self._offsets).reshape(-1)

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        self.pool.free((slots if self._page == 1 else slots[:: self._page] // self._page).numpy())

    def pair(self, tokens: int) -> None:
        self.free_segment(self.alloc(tokens), start_pos=0)

    def pair_and_ask(self, tokens: int) -> None:
        self.free_segment(self.alloc(tokens), start_pos=0)
        self.pool.sort()


class Stock:
    """SGLang's allocator; frees go its cheapest way for the slots of one request."""

    def __init__(self, pool_tokens: int, page: int, scattered: bool) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        if page == 1:
            self.inner = TokenToKVPoolAllocator(pool_tokens, torch.bfloat16, "cpu", None, False)
            self.pair = lambda tokens: self.inner.free(self.inner.alloc(tokens))
        else:
            self.inner = PagedTokenToKVPoolAllocator(pool_tokens, page, torch.bfloat16, "cpu", None, False)
            self.pair = lambda tokens: self.inner.free_segment(self.inner.alloc(tokens), start_pos=0)
        self.alloc, self.free_segment = self.inner.alloc, self.inner.free_segment
        occupy(self, pool_tokens, page, scattered)


def occupy(allocator: "Ours | Stock", pool_tokens: int, page: int, scattered: bool) -> None:
    """Put a sixteenth of the pool in use, in one piece, or a random quarter of its pages."""
    if not scattered:
        allocator.alloc(max(1, pool_tokens // page // 16) * page)
        return
    pages = allocator.alloc(pool_tokens).reshape(-1, page)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(pages))[len(pages) // 4 :])
    allocator.free_segment(pages[order].reshape(-1), start_pos=0)


def alternate(calls: list[Callable[[], None]], rounds: int) -> list[float]:
    """Median microseconds of each call, measured in turns, in an order that rotates."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds):
        for which in range(len(calls)):
            at = (which + turn) % len(calls)
            start = time.perf_counter()
            calls[at]()
            times[at].append(time.perf_counter() - start)
    return [round(statistics.median(kept) * 1e6, 1) for kept in times]


def pairs(rounds: int) -> list[dict]:
    """One allocation and one free, over pages, states of the pool and sizes."""
    rows = []
    for page, scattered in ((1, False), (1, True), (64, False), (64, True)):
        for pool_tokens in POOLS:
            stock, ours, asked = (make(pool_tokens, page, scattered) for make in (Stock, Ours, Ours))
            for tokens in (256, 1024, 4096):
                calls = [lambda n=tokens, one=one: one.pair(n) for one in (stock, ours)]
                stock_us, ours_us = alternate(calls, rounds)
                _, asked_us = alternate([calls[0], lambda n=tokens, one=asked: one.pair_and_ask(n)], rounds)
                row = {"page": page, "free_pages": "scattered" if scattered else "whole"}
                row |= {"pool_tokens": pool_tokens, "request_tokens": tokens}
                row |= {"stock_us": stock_us, "ours_us": ours_us, "ratio": round(ours_us / stock_us, 3)}
                row |= {"asked_us": asked_us}
                rows.append(row)
                print(row, flush=True)
            ours.budget.check()
    return rows


def churn(rounds: int) -> list[dict]:
    """Requests of random lengths that end in random order."""
    rows = []
    for page in (1, 64):
        for pool_tokens in POOLS:
            rng = np.random.default_rng(1)
            mean = 1024
            running = pool_tokens // 2 // mean
            lengths = rng.integers(mean // 128, mean // 64 * 3 // 2 + 1, size=running + rounds) * 64
            ends = rng.integers(0, running, size=rounds)
            sides = [make(pool_tokens, page, False) for make in (Stock, Ours)]
            held = [[side.alloc(int(n)) for n in lengths[:running]] for side in sides]
            times: list[list[float]] = [[], []]
            for turn in range(rounds):
                for at in (0, 1) if turn % 2 else (1, 0):
                    side, mine, slot = sides[at], held[at], int(ends[turn])
                    start = time.perf_counter()
                    side.free_segment(mine[slot], start_pos=0)
                    mine[slot] = side.alloc(int(lengths[running + turn]))
                    times[at].append(time.perf_counter() - start)
            medians, means = ([round(f(kept) * 1e6, 1) for kept in times] for f in (statistics.median, statistics.mean))
            row = {"page": page, "pool_tokens": pool_tokens, "running": running, "mean_tokens": mean}
            row |= {"stock_us": medians[0], "ours_us": medians[1], "ratio": round(medians[1] / medians[0], 3)}
            row |= {"stock_mean_us": means[0], "ours_mean_us": means[1], "mean_ratio": round(means[1] / means[0], 3)}
            rows.append(row)
            print(row, flush=True)
    return rows


def quantiles(samples: list[tuple[float, float]]) -> dict[str, dict[str, float]]:
    """p50, p99 and maximum of (elapsed, processor) seconds, in microseconds."""
    found = {}
    for name, values in zip(("elapsed_us", "processor_us"), zip(*samples, strict=True), strict=True):
        ordered = sorted(values)
        at = {"p50": ordered[len(ordered) // 2], "p99": ordered[int(len(ordered) * 0.99)], "max": ordered[-1]}
        found[name] = {key: round(value * 1e6, 1) for key, value in at.items()} | {"samples": len(ordered)}
    return found


def sorting(rounds: int) -> dict:
    """The longest sort there can be, in the largest pool, and the allocation after it."""
    side = Ours(POOLS[-1], 1, scattered=True)
    shuffle = np.random.default_rng(2)
    took: dict[str, list[tuple[float, float]]] = {"draw": [], "sort": []}

    def timed(name: str, call: Callable[[], np.ndarray | None]) -> np.ndarray | None:
        start, busy = time.perf_counter(), time.thread_time()
        given = call()
        took[name].append((time.perf_counter() - start, time.thread_time() - busy))
        return given

    for _ in range(rounds):
        pages = timed("draw", lambda: side.pool.alloc(1 << 15))
        side.pool.free(shuffle.permutation(pages))
        timed("sort", side.pool.sort)
    row = {"pool_tokens": POOLS[-1], "loose_pages": 1 << 15}
    row |= {name: quantiles(samples) for name, samples in took.items()}
    print(row, flush=True)
    return row
