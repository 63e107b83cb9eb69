"""What the router adds to a request: to read its body, name its pages, ask the index and the policy.

    python -m benchmarks.serving.router_cost [--tokens 8192] [--requests 2000] [--seed 1]

In one process, without a network. Workers hold conversations whose prompts are asked for, so that walks go deep.
`rendered` is a prompt that a worker has named (chats); the milliseconds of rendering and tokenising are the worker's,
and are measured beside it by `tokenise`, the demo tokenizer on the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks import provenance
from sglang_hybrid.cluster.prompts import _of_ids, json_of
from sglang_hybrid.demo import model
from sglang_hybrid.routing.index import NOTHING, RestartIndex, block_hashes
from sglang_hybrid.routing.policies import Offer, Prompt, create

PAGE = 64
KEPT = 40
"""Conversations that each worker holds."""


def quantiles(times: list[float]) -> dict[str, float]:
    return {f"p{q}_ms": round(float(1e3 * np.quantile(times, q / 100)), 3) for q in (50, 99)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng, head, rows = random.Random(options.seed), provenance.head("numpy"), []
    for count in (2, 16, 64):
        index, policy = RestartIndex(PAGE), create("restart_points")
        workers = [f"http://worker-{at}:30000" for at in range(count)]
        talks = [[rng.randrange(150_000) for _ in range(options.tokens)] for _ in range(KEPT)]
        for worker in workers:
            for talk in rng.sample(talks, KEPT // 2):
                names = block_hashes(talk[:-1], PAGE)
                index.apply(worker, {"type": "BlockStored", "block_hashes": names})
                states = {"kv_cache_spec_kind": "mamba", "block_hashes": [names[rng.randrange(len(names))]]}
                index.apply(worker, {"type": "BlockStored", **states})
        raw = [json.dumps({"input_ids": talk, "sampling_params": {}}).encode() for talk in talks]
        named = [block_hashes(talk[:-1], PAGE) for talk in talks]
        for kind in ("ids", "rendered"):
            times = []
            for _ in range(options.requests):
                at = rng.randrange(KEPT)
                start = time.perf_counter()
                if kind == "ids":
                    body = json_of(raw[at])
                    assert body is not None
                    names = _of_ids(body["input_ids"], PAGE, None).names
                else:
                    names = named[at]
                reaches = index.reaches_of(names)
                offers = {worker: Offer(reaches.get(worker, NOTHING), 0, 1) for worker in workers}
                policy.choose(Prompt(options.tokens, names, PAGE), offers)
                times.append(time.perf_counter() - start)
            rows.append({"workers": count, "prompt": kind, **quantiles(times)})
            print(rows[-1], flush=True)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.build(Path("models") / "demo-gdn", "gdn"))
    text, times = "the old mill keeps " * (options.tokens // 19), []
    for _ in range(50):
        start = time.perf_counter()
        tokenizer.encode(text)
        times.append(time.perf_counter() - start)
    rows.append({"prompt": "tokenise", **quantiles(times)})
    print(provenance.write("serving", "router-cost", {**head, **vars(options), "page_tokens": PAGE, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
