"""SGLang's own workload of shared prefixes, by its own client, at several rates: ours beside stock SGLang.

    python -m benchmarks.serving.shared_prefix [--rates 2 2.5 3] [--seeds 11 12]

`bench_serving --dataset-name generated-shared-prefix`: groups of prompts, each with a prefix of its own, in random
order at Poisson times. 32 state slots and 8 requests at once: running requests hold most of the states, so bursts take
them from the cache. Every server gets the same prompts at the same times with an empty cache; they take turns, and the
others idle. `ours, locked` keeps the states of running prompts, as SGLang does by default; `endless` is
ours with 512 states: what no cache of 32 can reach. Times are milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.servers import ENVIRONMENT, STOCK, Client, Command
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import LAUNCHER, Server

GROUPS, PROMPTS, SHARED_LEN, QUESTION_LEN, OUTPUT_LEN = 24, 6, 1024, 48, 32
"""Lengths are words of SGLang's generator; with the embedded tokenizer a prefix becomes about 2,700 tokens."""

STATES, ENDLESS, TOKENS, RUNNING = 32, 512, 262_144, 8
_ONCE = ("ours, locked", "endless")
"""Measured with the first seed only."""

_KEYS = ("mean_ttft_ms", "median_ttft_ms", "p95_ttft_ms", "p99_ttft_ms", "completed", "duration")


def commands() -> dict[str, Command]:
    """The servers by name; the order in which they take turns."""
    sizes = ["--max-total-tokens", str(TOKENS), "--max-running-requests", str(RUNNING), "--enable-metrics"]

    def states(count: int) -> list[str]:
        return [*sizes, "--max-mamba-cache-size", str(count)]

    flags = [*STOCK, "--mamba-radix-cache-strategy", "extra_buffer", *states(STATES)]
    return {
        "ours": (LAUNCHER, states(STATES), ENVIRONMENT),
        "ours, locked": (LAUNCHER, states(STATES), {**ENVIRONMENT, "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": "0"}),
        "stock": ("sglang.launch_server", flags, ENVIRONMENT),
        "endless": (LAUNCHER, states(ENDLESS), ENVIRONMENT),
    }


def run(server: Server, folder: Path, rate: float, seed: int, out: Path) -> dict[str, Any]:
    """One pass of SGLang's client; its figures and the share of prompt tokens that came from the cache."""
    Client(server).flush()
    before = counters(server)
    command = [
        sys.executable, "-m", "sglang_hybrid.bench_serving", "--backend", "sglang", "--host", "127.0.0.1",
        "--port", str(server.port), "--model", str(folder), "--dataset-name", "generated-shared-prefix",
        "--gsp-num-groups", str(GROUPS), "--gsp-prompts-per-group", str(PROMPTS),
        "--gsp-system-prompt-len", str(SHARED_LEN), "--gsp-question-len", str(QUESTION_LEN),
        "--gsp-output-len", str(OUTPUT_LEN), "--request-rate", str(rate), "--seed", str(seed),
        "--output-file", str(out), "--disable-tqdm",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(out.parent)}  # the client caches its prompts there
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    if done.returncode:
        raise RuntimeError(done.stdout[-1500:] + done.stderr[-1500:])
    figures = json.loads(out.read_text().splitlines()[-1])
    prompt, cached = (after - start for after, start in zip(counters(server), before, strict=True))
    row = {key: round(figures[key], 2) for key in _KEYS}
    return {**row, "prompt_tokens": prompt, "cached_tokens": cached, "hit_rate": round(cached / prompt, 4)}


def counters(server: Server) -> tuple[int, int]:
    """Prompt and cached tokens that the server has counted so far."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as response:
        text = response.read().decode()
    totals = []
    for name in ("prompt_tokens_total", "cached_tokens_total"):
        found = re.findall(rf"^sglang:{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
        totals.append(int(sum(float(value) for value in found)))
    return totals[0], totals[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 2.5, 3.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12])
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = model.build(Path("models") / "demo-gdn", "gdn").resolve()
        servers = {}
        for name, (launcher, flags, environment) in commands().items():
            log = Path(scratch) / f"{name.replace(', ', '-')}.log"
            servers[name] = stack.enter_context(
                Server(folder, flags, log=log, environment=environment, launcher=launcher)
            )
            servers[name].wait_ready()
        for name, server in servers.items():  # what is done once is done before anything is timed
            run(server, folder, 8.0, 1, Path(scratch) / f"warm-{name.replace(', ', '-')}.jsonl")
        for rate in given.rates:
            for seed in given.seeds:
                for name, server in servers.items():
                    if name in _ONCE and seed != given.seeds[0]:
                        continue
                    out = Path(scratch) / f"{name.replace(', ', '-')}-{rate}-{seed}.jsonl"
                    rows.append({"server": name, "rate": rate, "seed": seed, **run(server, folder, rate, seed, out)})
                    print(rows[-1])
    shape = {"groups": GROUPS, "prompts_per_group": PROMPTS, "states": STATES, "endless_states": ENDLESS}
    shape |= {"kv_tokens": TOKENS, "running": RUNNING, "output_tokens": OUTPUT_LEN}
    shape |= provenance.head("sglang", "torch")
    print(provenance.write("serving", "shared-prefix-gdn", {**shape, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
