"""Two servers behind a router: where requests go, what is reused, how long the first token takes.

    python -m benchmarks.serving.cluster [--load documents agents] [--sglang-router PYTHON] [--rounds 3] [--seed 5]

The same two servers (ours, states scarce) stay up; routers before them take turns, round by round, caches flushed, the
same prompts at the same Poisson times, which do not wait for answers. The rate is `utilisation` of what the two
complete in closed loop under round robin. `documents`: each asked about several times, in random order. `agents`: a
system text for each agent, and conversations of three turns under it. `sglang:...` are policies of SGLang's own router,
run by a Python that has `sglang-router` (0.3.2); without it these rows are left out. The bound of the hit rate is what
is left if every prefix were computed once, somewhere.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import provenance
from benchmarks.serving.load import percentiles
from benchmarks.serving.servers import ENVIRONMENT, at_times, chunks, flush, text
from sglang_hybrid.core.process import free_port
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server

Row = dict[str, Any]
OURS = ("round_robin", "least_load", "text", "kv_events", "restart_points")
THEIRS = ("cache_aware",)
SERVERS, RUNNING, ANSWER = 2, 4, 6
ALL_CLIENTS = 8
SGLANG = """
import sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
port, numbers, policy, *urls = sys.argv[1:]
args = RouterArgs(worker_urls=urls, port=int(port), policy=policy, prometheus_port=int(numbers), log_level="error")
args.host = "127.0.0.1"
Router.from_args(args).start()
"""


def documents(rng: random.Random) -> list[list[str]]:
    """Prompts in their order; those of one list come one after the other, each before its next."""
    texts = [text(rng, 1500) for _ in range(60)]
    order = [number for _ in range(4) for number in rng.sample(range(60), 60)]
    return [[texts[number] + text(rng, 120)] for number in order]


def agents(rng: random.Random) -> list[list[str]]:
    systems = [text(rng, 1200) for _ in range(40)]
    talks = []
    for number in rng.choices(range(40), weights=[1 / (rank + 1) ** 0.7 for rank in range(40)], k=120):
        talk = systems[number] + text(rng, 150)
        turns = [talk]
        for _ in range(2):
            talk += text(rng, 60) + text(rng, 120)  # what was answered, as the client has it, and a tool's result
            turns.append(talk)
        talks.append(turns)
    return talks


LOADS = {"documents": documents, "agents": agents}


def sizes(load: str) -> list[str]:
    """States and KV of one server: with its running requests, about a third of what the load would reuse."""
    states = 5 * RUNNING + (10 if load == "documents" else 16)
    return [
        "--max-mamba-cache-size",
        str(states),
        "--max-total-tokens",
        "24576",
        "--max-running-requests",
        str(RUNNING),
    ]


def schedule(load: str, seed: int, rate: float) -> list[tuple[float, str]]:
    """When each prompt is sent: the turns of a talk come a few seconds after each other."""
    rng = random.Random(seed)
    talks = LOADS[load](rng)
    count = sum(len(talk) for talk in talks)
    at, found = 0.0, []
    for talk in talks:
        at += rng.expovariate(rate * len(talks) / count)
        when = at
        for prompt in talk:
            found.append((when, prompt))
            when += 2.0 + rng.expovariate(0.5)
    return sorted(found)


def bound(prompts: list[str]) -> float:
    """Characters, which are tokens, that some earlier prompt began with, of all."""
    seen: set[str] = set()
    reused = 0
    for prompt in prompts:
        ends = [at for at in range(64, len(prompt), 64) if prompt[:at] in seen]
        reused += max(ends, default=0)
        seen.update(prompt[:at] for at in range(64, len(prompt) + 1, 64))
    return reused / sum(map(len, prompts))


def ask(url: str, prompt: str) -> Row:
    sampling = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
    found = list(chunks(url + "/generate", {"text": prompt, "sampling_params": sampling}, 600))
    meta = found[-1][1]["meta_info"]
    return {"ttft_s": found[0][0], "cached": meta["cached_tokens"], "prompt": meta["prompt_tokens"]}


def replay(url: str, asked: list[tuple[float, str]]) -> list[Row]:
    return at_times([start for start, _ in asked], lambda number: ask(url, asked[number][1]), len(asked))


class Router:
    """A router's process before `workers`."""

    def __init__(self, command: list[str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self) -> None:
        for _ in range(600):
            try:
                if ask(self.url, "are you there")["prompt"]:
                    return
            except OSError:
                time.sleep(0.2)
        raise TimeoutError(f"the router does not answer: {self.process.args!r}")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def ours(policy: str, urls: list[str]) -> Router:
    port = free_port()
    named = [part for url in urls for part in ("--worker", url)]
    return Router(
        [sys.executable, "-m", "sglang_hybrid", "route", "--port", str(port), "--routing", policy, *named], port
    )


def theirs(python: str, policy: str, urls: list[str]) -> Router:
    port = free_port()
    return Router([python, "-c", SGLANG, str(port), str(free_port()), policy, *urls], port)


def measure(load: str, options: argparse.Namespace, scratch: Path) -> Row:
    with ExitStack() as stack:
        urls = serve(load, scratch, stack)
        routers = {name: stack.enter_context(closing(ours(name, urls))) for name in OURS}
        if options.sglang_router:
            for name in THEIRS:
                routers[f"sglang:{name}"] = stack.enter_context(closing(theirs(options.sglang_router, name, urls)))
        for router in routers.values():
            router.wait()
        prompts = [prompt for _, prompt in schedule(load, options.seed, 1.0)]
        begin = time.perf_counter()
        with ThreadPoolExecutor(ALL_CLIENTS) as pool:
            list(pool.map(lambda prompt: ask(routers["round_robin"].url, prompt), prompts))
        rate = options.utilisation * len(prompts) / (time.perf_counter() - begin)
        asked = schedule(load, options.seed, rate)
        done: dict[str, list[list[Row]]] = {name: [] for name in routers}
        names = list(routers)
        for turn in range(options.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                for url in urls:
                    flush(url)
                time.sleep(0.5)
                done[name].append(replay(routers[name].url, asked))
    rows = [summary(name, rounds) for name, rounds in done.items()]
    for row in rows:
        print(load, {key: value for key, value in row.items() if key != "ttft_s"}, flush=True)
    best = min(
        row["ttft_p95_ms"] for row in rows if row["router"] in ("least_load", "round_robin", "sglang:cache_aware")
    )
    ratio = next(row["ttft_p95_ms"] for row in rows if row["router"] == "restart_points") / best
    return {
        "requests": len(asked),
        "rate_per_s": round(rate, 3),
        "flags": sizes(load),
        "bound_hit_rate": round(bound([prompt for _, prompt in asked]), 4),
        "ttft_p95_to_best_of_others": round(ratio, 3),
        "rows": rows,
    }


def serve(load: str, scratch: Path, stack: ExitStack) -> list[str]:
    """Start the servers, which tell of their states; their addresses once all of them answer."""
    folder = model.build(Path("models") / "demo-gdn", "gdn").resolve()
    servers = []
    for number in range(SERVERS):
        replay_port, port = free_port(), free_port()
        channel = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{replay_port}",
            "topic": "kv",
        }
        told = ["--hybrid-state-events", "published", "--kv-events-config", json.dumps(channel)]
        flags = [*sizes(load), "--page-size", "64", *told]
        log = scratch / f"{load}-{number}.log"
        servers.append(stack.enter_context(Server(folder, flags, log=log, environment=ENVIRONMENT)))
    for server in servers:
        server.wait_ready()
    return [server.url for server in servers]


def summary(name: str, rounds: list[list[Row]]) -> Row:
    """Of one router."""
    every = [row for each in rounds for row in each]
    hit = sum(row["cached"] for row in every) / sum(row["prompt"] for row in every)
    times = [[round(row["ttft_s"], 5) for row in each] for each in rounds]
    return {"router": name, "hit_rate": round(hit, 4), **percentiles(np.concatenate(times)), "ttft_s": times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--sglang-router", metavar="PYTHON", help="an interpreter that has sglang-router")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--utilisation", type=float, default=0.8)
    options = parser.parse_args()
    head = provenance.head("sglang", "torch")
    with tempfile.TemporaryDirectory() as scratch:
        loads = {load: measure(load, options, Path(scratch)) for load in options.load}
    shape = {"seed": options.seed, "rounds": options.rounds, "utilisation": options.utilisation, "servers": SERVERS}
    print(provenance.write("serving", "cluster", {**head, **shape, "loads": loads}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
