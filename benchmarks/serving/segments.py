"""Prompts of retrieval: documents in ever new orders, as segments, beside stock SGLang's prefix cache.

    python -m benchmarks.serving.segments [--documents 24] [--per-prompt 8] [--tokens 1024] [--seed 1] [--part ...]

A prompt is a lead of its own, `per-prompt` documents drawn by Zipf in a new order, and a question. Documents are random
tokens; only times are measured here, benchmarks/quality says what answers are worth. Servers: stock (its prefix cache),
ours without marks, ours with segments in bfloat16 and int8. All documents were seen before. The ceiling is the same
prompt asked again: its whole prefix is cached.

`sequential` asks one prompt at a time; `one-more` measures what each further segment costs, hit and computed;
`throughput` raises an open-loop Poisson load until the 95th percentile of the first token passes a limit, twice what
stock needs for one prompt alone; it begins at a quarter of what the server could do without a break, by `sequential`.
`unmarked` asks prompts without marks, with segments on and off. The result is named after the load: 8x1024 is eight
documents of 1,024 tokens a prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.servers import ENVIRONMENT, STOCK, Client, chunks, words
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import LAUNCHER, Server

LEAD, QUESTION, ANSWER = 16, 32, 4
ZIPF = 0.9
LOADED_S = 20.0
"""How long prompts arrive at each rate at least: several times the limit, so that a queue that grows passes it."""
SIZES = ["--max-total-tokens", "131072", "--max-mamba-cache-size", "96", "--max-running-requests", "8"]
SEGMENTS = ["--hybrid-segments", "on", "--hybrid-segment-memory-gb", "2"]
SERVERS: dict[str, tuple[str, list[str]]] = {
    "stock": ("sglang.launch_server", STOCK),
    "ours, no segments": (LAUNCHER, []),
    "ours, segments": (LAUNCHER, SEGMENTS),
    "ours, segments in int8": (LAUNCHER, [*SEGMENTS, "--hybrid-segment-dtype", "int8"]),
}

Prompt = tuple[list[int], list[list[int]]]
"""Ids, and the ranges of segments."""
Limits = tuple[float, float]
"""Seconds to the first token of one prompt alone, and the limit under load."""


def over(rng: random.Random, documents: Iterable[list[int]]) -> Prompt:
    """A prompt over `documents`, which are asked for once its lead is drawn: a seed gives the same prompts as ever."""
    ids, ranges = words(rng, LEAD), []
    for document in documents:
        ranges.append([len(ids), len(ids) + len(document)])
        ids = ids + document
    return ids + words(rng, QUESTION), ranges


class Load:
    """Prompts over one set of documents."""

    def __init__(self, documents: int, per_prompt: int, tokens: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.documents = [words(self.rng, tokens) for _ in range(documents)]
        self.per_prompt = per_prompt
        self._weights = [1 / (rank + 1) ** ZIPF for rank in range(documents)]

    def prompt(self, count: int | None = None, fresh: int = 0) -> Prompt:
        """`count` documents in a new order, then `fresh` that nobody has seen."""
        chosen: list[int] = []
        while len(chosen) < (self.per_prompt if count is None else count):
            number = self.rng.choices(range(len(self.documents)), self._weights)[0]
            if number not in chosen:
                chosen.append(number)
        new = (words(self.rng, len(self.documents[0])) for _ in range(fresh))
        return over(self.rng, chain((self.documents[number] for number in chosen), new))

    def all(self) -> list[Prompt]:
        """Prompts that hold every document once, to warm up."""
        starts = range(0, len(self.documents), self.per_prompt)
        return [over(self.rng, self.documents[first : first + self.per_prompt]) for first in starts]


def ask(server: Server, prompt: Prompt, mark: bool, tokens: int = ANSWER) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token of an answer of `tokens`, that answer, and what it says of the cache."""
    ids, ranges = prompt
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    if mark:
        sampling["custom_params"] = {"segments": ranges}
    found = list(chunks(server.url + "/generate", {"input_ids": ids, "sampling_params": sampling}, 600))
    answer = found[-1][1]
    meta = answer["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return found[0][0], {
        "cached": meta["cached_tokens"],
        "segments": details.get("segment_tokens", 0),
        "missed": {key.removeprefix("miss_"): n for key, n in details.items() if key.startswith("miss_") and n},
        "prompt": len(ids),
        "output_ids": answer["output_ids"],
    }


def milliseconds(times: list[float]) -> dict[str, float]:
    ordered = sorted(1000 * t for t in times)
    return {
        "ttft_p50_ms": round(statistics.median(ordered), 1),
        "ttft_p95_ms": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 1),
    }


def warm(server: Server, load: Load, mark: bool) -> None:
    Client(server).flush()
    for prompt in load.all():
        ask(server, prompt, mark)


def sequential(server: Server, load: Load, mark: bool, count: int) -> dict[str, Any]:
    warm(server, load, mark)
    rows = [ask(server, load.prompt(), mark) for _ in range(count)]
    shares = {
        name: round(sum(said[name] for _, said in rows) / sum(said["prompt"] for _, said in rows), 4)
        for name in ("cached", "segments")
    }
    return {**milliseconds([seconds for seconds, _ in rows]), **shares}


def again(server: Server, load: Load, count: int) -> dict[str, Any]:
    """The ceiling: a prompt that was just asked."""
    times = []
    for _ in range(count):
        prompt = load.prompt()
        ask(server, prompt, False)
        times.append(ask(server, prompt, False)[0])
    return milliseconds(times)


def one_more(server: Server, load: Load, repeats: int) -> dict[str, Any]:
    """Milliseconds of one more segment: slope of the first token's time over their number, hit and computed."""
    warm(server, load, True)
    found: dict[str, Any] = {}
    for kind, make in {
        "hit": lambda n: load.prompt(n),
        "computed": lambda n: load.prompt(0, fresh=n),
    }.items():
        counts = [n for _ in range(repeats) for n in ((1, 4, 8, 12, 16) if kind == "hit" else (1, 2, 4))]
        rows = [(n, ask(server, make(n), kind == "hit")[0]) for n in counts]
        mean = statistics.linear_regression([n for n, _ in rows], [1000 * seconds for _, seconds in rows])
        found[f"{kind}_ms"] = round(mean.slope, 2)
        found[f"{kind}_base_ms"] = round(mean.intercept, 2)
    found["ratio"] = round(found["computed_ms"] / found["hit_ms"], 1)
    return found


def open_loop(server: Server, load: Load, mark: bool, rate: float, count: int) -> float:
    """The 95th percentile of the first token, seconds, of `count` prompts that arrive at `rate` a second."""
    times: list[float] = []
    threads = []
    prompts = [load.prompt() for _ in range(count)]
    for prompt in prompts:
        thread = threading.Thread(target=lambda p=prompt: times.append(ask(server, p, mark)[0]))
        thread.start()
        threads.append(thread)
        time.sleep(load.rng.expovariate(rate))
    for thread in threads:
        thread.join()
    return sorted(times)[int(0.95 * len(times))]


def throughput(server: Server, load: Load, mark: bool, alone: float, limit: float, count: int) -> dict[str, Any]:
    """The highest rate of a ladder of factors 1.25 at which the limit is kept; down, if the first one passes it.

    alone  seconds to the first token of one prompt alone
    """
    warm(server, load, mark)
    tried: list[dict[str, float]] = []

    def keeps(rate: float) -> bool:
        p95 = open_loop(server, load, mark, rate, max(count, round(LOADED_S * rate)))
        tried.append({"rate": round(rate, 3), "ttft_p95_ms": round(1000 * p95, 1)})
        return p95 <= limit

    first = 0.25 / alone
    upwards = keeps(first)
    for step in range(1, 12):
        if keeps(first * 1.25 ** (step if upwards else -step)) != upwards:
            break
    kept = [row["rate"] for row in tried if row["ttft_p95_ms"] <= 1000 * limit]
    return {"requests_per_s": max(kept, default=0.0), "limit_ms": round(1000 * limit, 1), "tried": tried}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--per-prompt", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=24, help="prompts of a row")
    parser.add_argument("--preset", default="gdn-medium")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    if "throughput" in given.part and "sequential" not in given.part:
        parser.error("throughput needs sequential, which says what a prompt takes alone")
    head = provenance.head("sglang", "torch")
    rows: list[dict[str, Any]] = []
    alone: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.build(Path("models") / given.preset, given.preset).resolve()
        for name, (launcher, flags) in SERVERS.items():
            load = Load(given.documents, given.per_prompt, given.tokens, given.seed)
            log = Path(scratch) / f"{name}.log"
            with Server(folder, [*flags, *SIZES], log=log, environment=ENVIRONMENT, launcher=launcher) as server:
                server.wait_ready()
                mark = "segments" in name and not name.endswith("no segments")
                for part in given.part:
                    row = PARTS[part](server, load, mark, given, (alone.get(name, 0.0), 2 * alone.get("stock", 0.0)))
                    if row is None:
                        continue
                    rows.append({"server": name, "part": part, **row})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                    if part == "sequential":
                        alone[name] = row["ttft_p50_ms"] / 1000
    facts = {name: getattr(given, name) for name in ("documents", "per_prompt", "tokens", "seed", "preset", "count")}
    figure = f"segments-{given.preset}-{given.per_prompt}x{given.tokens}"
    print(provenance.write("serving", figure, {**head, **facts, "zipf": ZIPF, "rows": rows}))
    return 0


def _again(server: Server, load: Load, mark: bool, given: Any, limits: Limits) -> dict[str, Any] | None:
    return None if mark else again(server, load, given.count // 2)


def _unmarked(server: Server, load: Load, mark: bool, given: Any, limits: Limits) -> dict[str, Any] | None:
    return sequential(server, load, False, given.count)


PARTS: dict[str, Callable[[Server, Load, bool, Any, Limits], dict[str, Any] | None]] = {
    "sequential": lambda server, load, mark, given, limits: sequential(server, load, mark, given.count),
    "again": _again,
    "one-more": lambda server, load, mark, given, limits: one_more(server, load, 3) if mark else None,
    "throughput": lambda server, load, mark, given, limits: throughput(server, load, mark, *limits, given.count),
    "unmarked": _unmarked,
}


if __name__ == "__main__":
    raise SystemExit(main())
