"""What one decision costs: match, insert and evict against the number of cached leaves, and bytes per remembered token.

    python -m benchmarks.sim.decision_cost --leaves 1000,4000,40000,400000 --policies tree,lru,forecast

A cache is filled until it holds `leaves` checkpoints and evicts on every commit; then `--requests` more are timed. A
request is 256 tokens or more: half start with one of 64 shared beginnings of 128 tokens, half continue a recent
sequence by 128.
Columns, microseconds of processor time of the thread (wall time beside it; a busy machine shows there):
`match` = lookup; `commit` = all that the simulated cache does for a request, its tree included; `decide` = the part of
that in `Decisions`, which is what a server asks: history, admission, prices, victims, guard. The policy `tree` is no
policy but the floor: validation, match, insert and removal of the oldest leaf in the bare tree, nothing decided.
With `--repeats` above 1 all of it is done anew that many times, request by request the same, and each request counts
with its lowest processor time (and, apart from that, its lowest wall time): what others on the machine add is not the
same each time, what the code takes is. `first_cpu_us` is the first run alone.
`form` says whether the decisions ran compiled (`scripts/compile`) or interpreted
(`scripts/compile --remove`).
"""

import argparse
import gc
import time
import tracemalloc
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import head, write
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix import FORM
from sglang_hybrid.prefix.reuse.classes import PRIORS
from sglang_hybrid.prefix.reuse.history import History
from sglang_hybrid.prefix.reuse.table import ReuseTable
from sglang_hybrid.prefix.tree.mark import Kind, Mark
from sglang_hybrid.prefix.tree.radix_tree import RadixTree
from sglang_hybrid.prefix.tree.tokens import Tokens, as_tokens
from sglang_hybrid.sim.cache import open_cache
from sglang_hybrid.sim.plots import legend_below
from sglang_hybrid.sim.prefix_cache import PrefixCache

MODEL = ModelSpec("unit", 1, 1000, 1.0, 0.0, context_tokens=4096)
SHARED_TOKENS, NEW_TOKENS, SHARED = 128, 128, 64
PERCENTILES = (50, 90, 99)


class Requests:
    """An endless, seeded stream of token sequences as described above."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._shared = [self._text(SHARED_TOKENS) for _ in range(SHARED)]
        self._recent: deque[Tokens] = deque(maxlen=256)

    def _text(self, n: int) -> Tokens:
        return self._rng.integers(0, 150_000, n, dtype=np.int32)

    def next(self) -> Tokens:
        if self._recent and self._rng.random() < 0.5:
            start = self._recent[int(self._rng.integers(len(self._recent)))][:1024]
        else:
            start = self._shared[int(self._rng.integers(SHARED))]
        tokens = np.concatenate((start, self._text(NEW_TOKENS)))
        self._recent.append(tokens)
        return tokens


class Timed:
    """Decisions that add up the time spent in them, whatever is asked."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.cpu_s = self.wall_s = 0.0

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._inner, name)
        if not callable(asked):
            return asked

        def ask(*args: Any, **kwargs: Any) -> Any:
            wall, start = time.perf_counter(), time.thread_time()
            answer = asked(*args, **kwargs)
            self.cpu_s += time.thread_time() - start
            self.wall_s += time.perf_counter() - wall
            return answer

        setattr(self, name, ask)
        return ask


def percentiles(values: np.ndarray) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)) * 1e6, 1) for p in PERCENTILES}


def timed(cache: PrefixCache, requests: Requests, count: int, clock: float) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of processor and of wall time, each of shape [count, 3]: match, commit, decide."""
    decisions = Timed(cache.decisions)
    cache.decisions = decisions  # type: ignore[assignment]
    cpu, wall = np.zeros((count, 3)), np.zeros((count, 3))
    for i in range(count):
        tokens = requests.next()
        n_input, now = int(tokens.size) - 16, clock + i * 0.01
        decisions.cpu_s = decisions.wall_s = 0.0
        w0, c0 = time.perf_counter(), time.thread_time()
        cache.lookup(tokens[:n_input], now)
        c1, w1 = time.thread_time(), time.perf_counter()
        cache.commit(tokens, n_input, now)
        c2, w2 = time.thread_time(), time.perf_counter()
        cpu[i] = c1 - c0, c2 - c1, decisions.cpu_s
        wall[i] = w1 - w0, w2 - w1, decisions.wall_s
    return cpu, wall


def columns(times: np.ndarray) -> dict[str, dict[str, float]]:
    return {name: percentiles(each) for name, each in zip(("match", "commit", "decide"), times.T, strict=True)}


def measure(policy: str, leaves: int, count: int, seed: int, repeats: int) -> dict[str, Any]:
    runs = []
    for _ in range(repeats):
        found, cpu, wall = run(policy, leaves, count, seed)
        runs.append((cpu, wall))
    lowest = [np.min(times, axis=0) for times in zip(*runs, strict=True)]
    times = {"cpu_us": columns(lowest[0]), "wall_us": columns(lowest[1]), "first_cpu_us": columns(runs[0][0])}
    return {**found, "repeats": repeats, **times}


def run(policy: str, leaves: int, count: int, seed: int) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """A filled cache, and the times of `count` further requests."""
    requests = Requests(seed)
    cache = open_cache(policy, leaves * (MODEL.checkpoint_bytes + NEW_TOKENS), MODEL)
    clock, committed = 0.0, 0
    gc.disable()  # while filling: collections over a growing tree take most of the time
    while True:
        tokens = requests.next()
        clock += 0.01
        committed += 1
        if cache.commit(tokens, int(tokens.size) - 16, clock).evicted and committed >= leaves:
            break
    gc.enable()
    gc.collect()
    gc.freeze()  # as servers do after warming up: a full collection over the filled tree takes tens of milliseconds
    cpu, wall = timed(cache, requests, count, clock)
    gc.unfreeze()
    found = {"policy": policy, "leaves": leaves, "checkpoints": cache.tree.states, "nodes": cache.tree.nodes}
    found["kv_tokens"] = cache.tree.kv_tokens
    cache.check()
    return found, cpu, wall


def floor(leaves: int, count: int, seed: int, repeats: int) -> dict[str, Any]:
    """The bare tree under the same load: match, then insert one leaf and drop the oldest."""
    runs = [bare(leaves, count, seed) for _ in range(repeats)]
    cpu, wall = (np.min(times, axis=0) for times in list(zip(*runs, strict=True))[1:])
    row = {**runs[0][0], "repeats": repeats, "cpu_us": {"decide": percentiles(cpu)}}
    return row | {"wall_us": {"decide": percentiles(wall)}, "first_cpu_us": {"decide": percentiles(runs[0][1])}}


def bare(leaves: int, count: int, seed: int) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    requests, tree, order = Requests(seed), RadixTree(), deque[Any]()

    def step(tokens: Tokens) -> None:
        leaf = tree.insert(as_tokens(tokens), 0.0)
        tree.attach(leaf, Mark(Kind.FRESH, 0.0))
        order.append(leaf)
        if len(order) > leaves:
            tree.drop(order.popleft())
        tree.changed.clear()
        tree.rebased.clear()

    gc.disable()
    for _ in range(leaves + 100):
        step(requests.next())
    gc.enable()
    gc.collect()
    gc.freeze()
    cpu, wall = np.zeros(count), np.zeros(count)
    for i in range(count):
        tokens = requests.next()
        w0, c0 = time.perf_counter(), time.thread_time()
        tree.match(as_tokens(tokens[:-16]))
        step(tokens)
        cpu[i], wall[i] = time.thread_time() - c0, time.perf_counter() - w0
    gc.unfreeze()
    row = {"policy": "tree", "leaves": leaves, "checkpoints": tree.states, "nodes": tree.nodes}
    return row | {"kv_tokens": tree.kv_tokens}, cpu, wall


def memory(sequences: int, seed: int) -> dict[str, Any]:
    """Bytes per token of the cache tree and of the ghost history, Python objects included (tracemalloc)."""
    result: dict[str, Any] = {"sequences": sequences, "token_bytes": 4}
    for name in ("tree", "ghost"):
        requests = Requests(seed)
        tracemalloc.start()
        tree = RadixTree()
        history = History(ReuseTable(PRIORS))
        for step in range(sequences):
            tokens = requests.next()
            if name == "ghost":
                history.observe(tokens, int(tokens.size) - 16, step * 0.01)
            else:
                leaf = tree.insert(tokens, 0.0)
                tree.attach(leaf, Mark(Kind.FRESH, 0.0))
                tree.changed.clear()
                tree.rebased.clear()
            del tokens
        requests._recent.clear()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        kept = tree if name == "tree" else history.tree
        result[name] = {
            "tokens": kept.kv_tokens,
            "nodes": kept.nodes,
            "bytes_per_token": round(held / kept.kv_tokens, 2),
            "bytes_per_node": round((held - 4 * kept.kv_tokens) / kept.nodes, 1),
        }
    return result


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 5.2), layout="constrained")
    for number, policy in enumerate(dict.fromkeys(row["policy"] for row in rows)):
        mine = [row for row in rows if row["policy"] == policy]
        for name, style in (("p50", "-"), ("p99", "--")):
            axis.plot(
                [row["leaves"] for row in mine],
                [row["cpu_us"]["decide"][name] for row in mine],
                style,
                color=f"C{number}",
                marker="o",
                label=f"{policy} {name}",
            )
    axis.axhline(100, color="grey", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="cached leaves", ylabel="decisions of a request, µs of processor time")
    legend_below(figure)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", default="1000,4000,40000")
    parser.add_argument("--policies", default="tree,lru,superseded,gdsf,marconi:1,forecast")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--memory-sequences", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--most", type=int, default=100_000, help="leaves up to which anything is repeated")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rows = []
    for policy in arguments.policies.split(","):
        for leaves in map(int, arguments.leaves.split(",")):
            start = time.perf_counter()
            repeats = arguments.repeats if leaves <= arguments.most else 1
            what = (leaves, arguments.requests, arguments.seed, repeats)
            rows.append(floor(*what) if policy == "tree" else measure(policy, *what))
            print(policy, leaves, rows[-1]["cpu_us"], f"{time.perf_counter() - start:.0f} s", flush=True)
    result = head("numpy") | {"form": FORM, "seed": arguments.seed, "requests": arguments.requests}
    result |= {"columns": __doc__, "rows": rows}
    result["memory"] = memory(arguments.memory_sequences, arguments.seed)
    print(result["memory"])
    path = write("sim", f"decision-cost-{FORM}", result)
    plot(rows, path.with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
