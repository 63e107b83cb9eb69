"""Greedy tokens with the cache on against the cache off: thousands of random requests, float32, and no difference.

    python -m benchmarks.serving.equality [--requests 200]

For a GDN and a Mamba-2 model, both strategies, both event loops and two chunk sizes, with pools small enough to evict
all the time: prompts of lengths around every boundary, shared, continued and rewritten prefixes, eight at once, while
other clients hang up in mid-prefill. Where two outputs differ, transformers says whether the two tokens were a tie
(closer than 2e-4 in a logit).
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import provenance
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from tests.engine.prompts import prompts, words
from tests.engine.support import Client, Reference

POOLS = ("--max-mamba-cache-size", "40", "--max-running-requests", "8", "--max-total-tokens", "12000")
OFF = ("--disable-radix-cache", "--max-running-requests", "8")


def rewritten(batch: list[list[int]], rng: random.Random) -> list[list[int]]:
    """`batch`, and after each third prompt the same one with its middle rewritten or its end cut off."""
    made = []
    for number, prompt in enumerate(batch):
        made.append(prompt)
        if number % 3 == 0 and len(prompt) > 40:
            at = rng.randrange(1, len(prompt))
            made.append(prompt[:at] + words(rng, rng.randint(1, 60)) if number % 2 else prompt[:at])
    return made


def hang_up(client: Client, stop: threading.Event, seed: int) -> None:
    noise = random.Random(seed)
    while not stop.is_set():
        try:
            client.generate(words(noise, 900), timeout=0.15)
        except OSError:
            time.sleep(0.5)


def compare(client: Client, batch: list[list[int]], cold: list[Any], reference: Reference, seed: int) -> dict[str, int]:
    stop = threading.Event()
    rude = threading.Thread(target=hang_up, args=(client, stop, seed))
    rude.start()
    try:
        warm = client.generate_all(batch, at_once=8)
    finally:
        stop.set()
        rude.join()
    return judged(batch, warm, cold, reference)


def judged(batch: list[list[int]], warm: list[Any], cold: list[Any], reference: Reference) -> dict[str, Any]:
    """Counts over `batch` of outputs and cached tokens, `warm` held against `cold`; what is wrong is printed."""
    counts: dict[str, Any] = {
        "requests": len(batch),
        "hits": 0,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "equal": 0,
        "ties": 0,
        "wrong": 0,
    }
    for prompt, (one, hit), (other, _) in zip(batch, warm, cold, strict=True):
        counts["prompt_tokens"] += len(prompt)
        counts["cached_tokens"] += hit
        counts["hits"] += hit > 0
        if one == other:
            counts["equal"] += 1
            continue
        try:
            reference.assert_same(prompt, one, other)
            counts["ties"] += 1
        except AssertionError as error:
            counts["wrong"] += 1
            print(error, flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="per configuration, before rewriting")
    options = parser.parse_args()
    rows, seed = [], 31
    with tempfile.TemporaryDirectory() as scratch:
        for preset in ("gdn", "mamba2"):
            folder = model.build(Path(scratch) / preset, preset)
            reference = Reference(folder)
            batch = rewritten(prompts(seed, options.requests), random.Random(seed))
            with Server(folder, OFF, log=Path(scratch) / "off.log") as server:
                server.wait_ready()
                cold = Client(server).generate_all(batch, at_once=8)
            for strategy, loop in (("extra_buffer", "normal"), ("no_buffer", "normal"), ("extra_buffer", "overlap")):
                for chunk in (128, 512):
                    flags = ("--mamba-radix-cache-strategy", strategy, "--chunked-prefill-size", str(chunk), *POOLS)
                    flags += ("--hybrid-cpu-event-loop", loop)
                    with Server(folder, flags, log=Path(scratch) / "on.log") as server:
                        server.wait_ready()
                        counts = compare(Client(server), batch, cold, reference, seed)
                        alive = server.process.poll() is None
                    row = {"model": preset, "strategy": strategy, "event_loop": loop, "chunk": chunk, "alive": alive}
                    rows.append({**row, **counts})
                    print(rows[-1], flush=True)
    total = {key: sum(row[key] for row in rows) for key in ("requests", "hits", "equal", "ties", "wrong")}
    print(total)
    head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid")
    print(provenance.write("serving", "equality", {**head, "seed": seed, "total": total, "rows": rows}))


if __name__ == "__main__":
    main()
