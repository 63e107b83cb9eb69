"""Servers and a client for the benchmarks of this folder."""

from __future__ import annotations

import json
import os
import random
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from sglang_hybrid.core.spec import ModelSpec, from_config
from sglang_hybrid.demo.server import LAUNCHER, Server

SIZES = ["--max-total-tokens", "65536", "--max-mamba-cache-size", "256", "--max-running-requests", "16"]
IDLE_WITHIN_S = 60
DEVICE = os.environ.get("SGLANG_HYBRID_DEVICE", "cpu")
"""Where the servers of this folder run: `cpu`, or `cuda` with everything else as SGLang chooses it there."""

ENVIRONMENT: dict[str, str] = {}
PLATFORM: list[str] = []
if DEVICE == "cpu":
    ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
    PLATFORM = ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]
    PLATFORM += ["--disable-overlap-schedule", "--sleep-on-idle"]
STOCK = [*PLATFORM, "--enable-cache-report"]

_WORDS = ("gate", "mill", "code", "baker", "brother", "key", "market", "river", "tower", "ship", "price", "keeper")

Command = tuple[str, list[str], dict[str, str]]
"""Launcher module, flags, environment."""


def hybrid(*flags: str) -> Command:
    """Our launcher, with its own defaults for the platform."""
    return LAUNCHER, [*SIZES, *flags], ENVIRONMENT


def stock(strategy: str = "extra_buffer", core: str = "rust") -> Command:
    """SGLang's launcher on the same platform, with the same sizes."""
    flags = [*STOCK, "--mamba-radix-cache-strategy", strategy, *SIZES]
    return "sglang.launch_server", flags, {**ENVIRONMENT, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core}


def split(budget_bytes: int, ratio: float, state_bytes: int, token_bytes: int) -> list[str]:
    """Flags of pools that take `budget_bytes` in a `ratio` of states to KV, as SGLang's --mamba-full-memory-ratio."""
    states = int(budget_bytes * ratio / (1 + ratio)) // state_bytes
    tokens = (budget_bytes - states * state_bytes) // token_bytes
    return ["--max-mamba-cache-size", str(states), "--max-total-tokens", str(tokens)]


def elastic(budget_bytes: float) -> list[str]:
    """Flags of elastic memory that has `budget_bytes` on a CPU."""
    return ["--hybrid-memory", "elastic", "--hybrid-cpu-memory-gb", str(budget_bytes / 1e9)]


def float32_spec(folder: Path) -> ModelSpec:
    """The model in `folder` as servers with `PLATFORM` hold it: KV and windows in float32."""
    return from_config(folder, kv_dtype="float32", conv_dtype="float32")


class Client:
    """Token ids in, times out."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def ask(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Stream one greedy completion; returns seconds to the first token, seconds in all, tokens, cached tokens.

        `verified`: passes that verified drafts, None where nothing drafts.
        """
        first, total, last = streamed(self.server.url, prompt, tokens)
        known = last["meta_info"]
        return {
            "ttft_s": first,
            "total_s": total,
            "output_ids": last["output_ids"],
            "cached_tokens": known["cached_tokens"],
            "verified": known.get("spec_verify_ct"),
        }

    def flush(self) -> None:
        flush(self.server.url)


def streamed(
    url: str, prompt: list[int], tokens: int, patience_s: float = 300, **more: Any
) -> tuple[float, float, dict[str, Any]]:
    """One greedy completion: seconds to its first token, seconds in all, its last chunk; `more` stands in the body."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    start = time.perf_counter()
    found = list(chunks(url + "/generate", {"input_ids": prompt, "sampling_params": sampling, **more}, patience_s))
    return found[0][0], time.perf_counter() - start, found[-1][1]


def chunks(url: str, body: dict[str, Any], patience_s: float = 300) -> Iterator[tuple[float, dict[str, Any]]]:
    """What `url` streams as an answer to `body`: seconds since it was sent, and the chunk."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps({**body, "stream": True}).encode(), headers)
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=patience_s) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                yield time.perf_counter() - start, json.loads(line[6:])


def flush(url: str) -> None:
    """Empty a server's cache once it is idle: its last batch may outlast the last token of an answer."""
    request = urllib.request.Request(f"{url}/flush_cache?timeout={IDLE_WITHIN_S}", b"", method="POST")
    urllib.request.urlopen(request, timeout=2 * IDLE_WITHIN_S).read()


def scheduler(server: Server) -> psutil.Process:
    family = psutil.Process(server.process.pid).children(recursive=True)
    return next(process for process in family if "scheduler" in process.name())


def words(rng: random.Random, count: int) -> list[int]:
    """Ids that the embedded tokenizer and every large one have."""
    return [rng.randint(3, 258) for _ in range(count)]


def text(rng: random.Random, characters: int) -> str:
    made = ""
    while len(made) < characters:
        made += rng.choice(_WORDS) + " "
    return made[:characters]


def median_of(pairs: list[float]) -> dict[str, float]:
    """Median of paired ratios, with the 95 % interval of a bootstrap over the pairs."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return {"median": statistics.median(pairs), "low": medians[50], "high": medians[1949]}


def at_times(starts: Sequence[float], ask: Callable[[int], dict[str, Any]], threads: int) -> list[dict[str, Any]]:
    """What `ask(number)` gives if called at `starts[number]`, in seconds from now; its `ttft_s` counts from there."""
    begin = time.perf_counter() + 0.5

    def send(number: int) -> dict[str, Any]:
        time.sleep(max(0.0, begin + starts[number] - time.perf_counter()))
        late = time.perf_counter() - begin - starts[number]
        done = ask(number)
        return {**done, "ttft_s": late + done["ttft_s"]}

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(send, range(len(starts))))
