"""Conversations with a server of several replicas: what the next turn finds, beside SGLang's turns and one replica.

    python -m benchmarks.serving.replicas [--replicas 2] [--chats 16] [--turns 5] [--clients 4]

`clients` conversations at a time, each waits for its answer. Servers: stock SGLang, which hands requests round, ours
with the same (`--hybrid-dp-routing round_robin`), ours by prefix, the default. The ceiling is one replica with room for
all conversations: every turn finds the one before. Hit rates count later turns; the first token is theirs too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.servers import Client, Command, hybrid, stock, words
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server

ANSWER = 24


def columns(replicas: int) -> dict[str, Command]:
    several = ["--dp-size", str(replicas)]
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(replicas))}

    def with_several(command: Command, *flags: str) -> Command:
        launcher, given, environment = command
        return launcher, [*given, *several, *flags], {**environment, **cores}

    return {
        "stock": with_several(stock()),
        "ours, round robin": with_several(hybrid(), "--hybrid-dp-routing", "round_robin"),
        "ours, by prefix": with_several(hybrid()),
        "one replica": hybrid(),
    }


def chat(client: Client, rng: random.Random, turns: int) -> list[dict[str, Any]]:
    """One conversation; its turns, the first left out."""
    history, later = words(rng, rng.randint(400, 1200)), []
    for turn in range(turns):
        answer = client.ask(history, ANSWER)
        if turn:
            later.append({"tokens": len(history), **answer})
        history = history + answer["output_ids"] + words(rng, rng.randint(20, 90))
    return later


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--preset", default="gdn")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.build(Path(scratch) / options.preset, options.preset)
        for column, (launcher, flags, environment) in columns(options.replicas).items():
            with Server(
                folder, flags, log=Path(scratch) / "server.log", environment=environment, launcher=launcher
            ) as server:
                server.wait_ready(300)
                client, begun = Client(server), time.perf_counter()
                with ThreadPoolExecutor(options.clients) as threads:
                    chats = [
                        threads.submit(chat, client, random.Random(f"{options.seed} {number}"), options.turns)
                        for number in range(options.chats)
                    ]
                    turns = [turn for each in chats for turn in each.result()]
                first = sorted(each["ttft_s"] * 1000 for each in turns)
                rows[column] = {
                    "hit_rate": round(sum(t["cached_tokens"] for t in turns) / sum(t["tokens"] for t in turns), 4),
                    "ttft_p50_ms": round(statistics.median(first), 1),
                    "ttft_p95_ms": round(first[int(0.95 * len(first))], 1),
                    "s": round(time.perf_counter() - begun, 1),
                }
                print(column, rows[column], flush=True)
    head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid")
    print(provenance.write("serving", "replicas", {**head, **vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
