"""Conversations that come back after the device forgot them: what a host tier gives back, ours beside stock SGLang.

    python -m benchmarks.serving.host_tier [--conversations 30] [--tokens 1900] [--seed 1]

Every conversation sends a long first prompt, then every one its second, the first and 64 tokens more, one request at a
time. The device has KV for eight of them, the host tier for 34 and for 96 states, so nothing needs to be forgotten. A
prefill runs in chunks of 256 tokens; where a server saves a state behind each, 96 states are those of 12 prompts, so
stock runs with three times as much host memory too. The bound of the hit rate is a first prompt's whole pages.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.servers import ENVIRONMENT, STOCK, Client, Command, words
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import LAUNCHER, Server
from sglang_hybrid.engine.hicache.copies import IO_BACKEND, LAYOUT

CHUNK, PAGE, MORE, ANSWER = 256, 64, 64, 4
STATES, RATIO, AMPLE = 24, 4, 12
RUNNING = 2


def flags(tokens: int, ratio: int = RATIO) -> list[str]:
    """KV of eight prompts on the device, and a host tier of `ratio` times its pools."""
    kv = 8 * (tokens + MORE + PAGE)
    tier = ["--enable-hierarchical-cache", "--hicache-ratio", str(ratio), "--hicache-io-backend", IO_BACKEND]
    tier += ["--hicache-mem-layout", LAYOUT, "--page-size", str(PAGE), "--chunked-prefill-size", str(CHUNK)]
    sizes = ["--max-total-tokens", str(kv), "--max-mamba-cache-size", str(STATES)]
    return [*tier, *sizes, "--max-running-requests", str(RUNNING)]


def measure(server: Server, first: list[list[int]], seed: int) -> dict[str, Any]:
    """Both turns of all conversations."""
    client, rng = Client(server), random.Random(seed + 1)
    client.flush()
    for prompt in first:
        client.ask(prompt, ANSWER)
    return second_turns(client, [[*prompt, *words(rng, MORE)] for prompt in first])


def second_turns(client: Client, prompts: list[list[int]]) -> dict[str, Any]:
    """Ask `prompts` one after the other: what of them was cached, and when their first tokens came."""
    answers = [client.ask(prompt, ANSWER) for prompt in prompts]
    cached = [answer["cached_tokens"] for answer in answers]
    times = sorted(1000 * answer["ttft_s"] for answer in answers)
    return {
        "second_turns_hit_rate": round(sum(cached) / sum(map(len, prompts)), 4),
        "second_turns_served": sum(tokens > 0 for tokens in cached),
        "ttft_p50_ms": round(statistics.median(times), 1),
        "ttft_p95_ms": round(times[int(0.95 * len(times))], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=1900, help="of a first prompt, and up to 60 more")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    head, rng, sizes = provenance.head("sglang", "torch"), random.Random(given.seed), flags(given.tokens)
    first = [words(rng, given.tokens + rng.randrange(60)) for _ in range(given.conversations)]
    stock, core = [*STOCK, "--mamba-radix-cache-strategy", "extra_buffer"], "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
    servers: dict[str, Command] = {
        "stock, Python core": ("sglang.launch_server", [*stock, *sizes], {core: "python"}),
        "stock, Rust core": ("sglang.launch_server", [*stock, *sizes], {core: "rust"}),
        "stock, Rust core, three times the host memory": (
            "sglang.launch_server", [*stock, *flags(given.tokens, AMPLE)], {core: "rust"},
        ),
        "ours": (LAUNCHER, sizes, {}),
    }  # fmt: skip
    rows = []
    folder = model.build(Path("models") / "demo-gdn", "gdn").resolve()
    with tempfile.TemporaryDirectory() as scratch:
        for name, (launcher, options, more) in servers.items():
            log = Path(scratch) / f"{name}.log"
            with Server(folder, options, log=log, environment={**ENVIRONMENT, **more}, launcher=launcher) as server:
                server.wait_ready()
                measure(server, [words(random.Random(99), 600)], 99)  # what is done once is done before
                rows.append({"server": name, **measure(server, first, given.seed)})
                print(rows[-1], flush=True)
    pages = sum(len(prompt) // PAGE * PAGE for prompt in first)
    bound = round(pages / sum(len(prompt) + MORE for prompt in first), 4)
    shape = {**vars(given), "more_tokens": MORE, "flags": sizes, "bound_hit_rate": bound}
    print(provenance.write("serving", "host-tier", {**head, **shape, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
