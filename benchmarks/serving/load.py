"""Time to first token under load while states are scarce: ours beside both cores of stock SGLang, in open loop.

    python -m benchmarks.serving.load [--workload chat ...] [--utilisation 0.8] [--rounds 3] [--seed 21]

The prompts of `contention.py`, first as there, one at a time (`alone`), then at Poisson times that do not wait for
answers, so that a time to the first token holds the queue before it. The rate is `utilisation` of the requests per
second that stock's Python core completes for `CLIENTS` that wait for theirs, answers included. Servers take turns
round by round, cache flushed, same prompts and times; the others idle meanwhile. `ideal` is a server whose cache
forgets nothing and that takes one request after the other, each for as long as a line through stock's times alone says
of the tokens that are left to compute; it spends no time on answers.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks import provenance
from benchmarks.serving import contention
from benchmarks.serving.contention import SIZES, started
from benchmarks.serving.servers import Client, at_times
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.demo import model

Row = dict[str, Any]
CLIENTS = 16


def capacity(client: Client, rows: list[Row]) -> float:
    """Requests per second with `CLIENTS` at a time."""
    client.flush()
    begin = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda row: ask(client, row), rows))
    return len(rows) / (time.perf_counter() - begin)


def ask(client: Client, row: Row) -> Row:
    return client.ask(row["tokens"][: row["prompt_tokens"]].tolist(), row["reply"])


def replay(client: Client, rows: list[Row], starts: np.ndarray) -> list[Row]:
    """Send the prompts of `rows` at `starts` (seconds from now); one row of times and cached tokens per prompt."""
    client.flush()

    def send(number: int) -> Row:
        answer = ask(client, rows[number])
        return {"ttft_s": answer["ttft_s"], "cached_tokens": answer["cached_tokens"]}

    return at_times(starts.tolist(), send, 64)


def ideal(rows: list[Row], starts: np.ndarray, line: tuple[float, float], spec: ModelSpec) -> list[float]:
    """Times to the first token where nothing is forgotten; `line`: seconds per token computed, and per request."""
    cache, free, times = contention.endless(spec), 0.0, []
    for row, start in zip(rows, starts.tolist(), strict=True):
        tokens, n_input = row["tokens"], row["prompt_tokens"]
        computed = n_input - cache.lookup(tokens[:n_input], start)
        cache.commit(tokens, n_input, start)
        free = max(free, start) + computed * line[0] + line[1]
        times.append(free - start)
    return times


def measure(workload: str, preset: str, seed: int, utilisation: float, rounds: int) -> dict[str, Any]:
    with started(workload, preset) as (clients, spec_of):
        singles = contention.run(workload, seed, clients)
        rows = [row for row in singles if "tokens" in row]
        alone = [row for row in singles if row["server"] == "stock python"]
        spans = np.array([row["ttft_s"] for row in alone])
        per_second = capacity(clients["stock python"], rows)
        slope, fixed = np.polyfit([row["prompt_tokens"] - row["cached_tokens"] for row in alone], spans, 1)
        starts = np.cumsum(np.random.default_rng(seed).exponential(1 / (utilisation * per_second), len(rows)))
        times: dict[str, list[list[float]]] = {name: [] for name in clients}
        hits: dict[str, list[float]] = {name: [] for name in clients}
        names = list(clients)
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                done = replay(clients[name], rows, starts)
                times[name].append([round(row["ttft_s"], 5) for row in done])
                asked = sum(row["prompt_tokens"] for row in rows)
                hits[name].append(sum(row["cached_tokens"] for row in done) / asked)
        spec = spec_of("hybrid")
    best = ideal(rows, starts, (float(slope), float(fixed)), spec)
    result: dict[str, Any] = {"requests": len(rows), "capacity_per_s": per_second, "utilisation": utilisation}
    result["line_s"] = [float(slope), float(fixed)]
    result["alone"] = contention.digest(workload, seed, singles, spec)
    for name, rounds_of in times.items():
        whole = percentiles(np.concatenate(rounds_of))
        result[name] = {"hit_rate": float(np.mean(hits[name])), **whole, "ttft_s": rounds_of}
    result["ideal"] = percentiles(np.array(best))
    for other in names[1:]:
        for quantile in (50, 95):
            result[f"ttft_p{quantile}_to_{other}"] = ratio(times["hybrid"], times[other], quantile / 100)
    return result


def percentiles(times: np.ndarray) -> dict[str, float]:
    return {f"ttft_p{q}_ms": float(1e3 * np.quantile(times, q / 100)) for q in (50, 95, 99)}


def ratio(ours: list[list[float]], theirs: list[list[float]], quantile: float) -> list[float]:
    """Our quantile over theirs, all rounds together; then the lowest and highest ratio of a single round."""
    single = [np.quantile(a, quantile) / np.quantile(b, quantile) for a, b in zip(ours, theirs, strict=True)]
    whole = np.quantile(np.concatenate(ours), quantile) / np.quantile(np.concatenate(theirs), quantile)
    return [float(whole), float(min(single)), float(max(single))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gdn", help=f"demo model: {', '.join(model.PRESETS)}")
    parser.add_argument("--workload", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--utilisation", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    options = parser.parse_args()
    results = {}
    for workload in options.workload:
        results[workload] = row = measure(workload, options.preset, options.seed, options.utilisation, options.rounds)
        for name, cell in row.items():
            short = (
                cell if not isinstance(cell, dict) else {k: v for k, v in cell.items() if k not in ("ttft_s", "rows")}
            )
            print(workload, name, short, flush=True)
    if not options.dry:
        head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid")
        print(provenance.write("serving", f"load-{options.preset}", {**head, "workloads": results}))


if __name__ == "__main__":
    main()
