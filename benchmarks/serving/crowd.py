"""How many should run at once: every session speaks as soon as it was answered, over one budget of KV and states.

    python -m benchmarks.serving.crowd [--workload agents fewshot] [--budget-mb 24] [--seed 21] [--dry]

Servers one after another, each asked the same sessions (`contention.sessions`) all at once: stock SGLang and ours with
SGLang's ratio of states to KV and no bound of requests but `--max-running-requests` 48, elastic memory with that and
with fewer. A run is hit rate, seconds for all, time to first token from the moment of asking, and how many ran at once
by the server's log. `unbounded` is the hit rate of a simulated server with endless memory.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving import contention
from benchmarks.serving.contention import Session, endless, predicted, sessions
from benchmarks.serving.servers import ENVIRONMENT, STOCK, Client, elastic, float32_spec, split, words
from sglang_hybrid.core.spec import MAMBA_FULL_MEMORY_RATIO, ModelSpec
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import LAUNCHER, Server

PRESET = "gdn"
SESSIONS = contention.SESSIONS | {"fewshot": 200, "rag": 120}
RUNNING = 48
FEWER = (24, 16, 8)
_RUNS = re.compile(r"(?:Prefill|Decode) batch.*?#running-req: (\d+)")


def servers(spec: ModelSpec, budget_bytes: int) -> dict[str, tuple[str, list[str]]]:
    """Name -> launcher and flags."""
    static = split(budget_bytes, MAMBA_FULL_MEMORY_RATIO, spec.checkpoint_bytes, spec.kv_bytes_per_token)
    stock = [*STOCK, "--mamba-radix-cache-strategy", "extra_buffer", *static]
    common = ["--decode-log-interval", "1", "--max-running-requests"]
    found = {
        "stock 0.9": ("sglang.launch_server", [*stock, *common, str(RUNNING)]),
        "here 0.9": (LAUNCHER, [*static, *common, str(RUNNING)]),
    }
    return found | {f"elastic, {n}": (LAUNCHER, [*elastic(budget_bytes), *common, str(n)]) for n in (RUNNING, *FEWER)}


def crowd(client: Client, workload: str, seed: int) -> dict[str, float]:
    """Ask all that the sessions have to ask, each as soon as it may."""
    spoken = sessions(workload, random.Random(seed))[: SESSIONS[workload]]

    def hold(session: Session) -> list[tuple[int, int, float]]:
        rows, more = [], True
        while more:
            prompt = session.prompt
            answer = client.ask(prompt, session.reply)
            rows.append((len(prompt), answer["cached_tokens"], answer["ttft_s"]))
            more = session.answer(answer["output_ids"])
        return rows

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(spoken)) as pool:
        rows = [row for held in pool.map(hold, spoken) for row in held]
    return {
        "requests": len(rows),
        "seconds": time.perf_counter() - begin,
        "hit_rate": sum(cached for _, cached, _ in rows) / sum(asked for asked, _, _ in rows),
        "computed_tokens": sum(asked - cached for asked, cached, _ in rows),
        "ttft_p50_s": statistics.median(first for _, _, first in rows),
        "ttft_p95_s": statistics.quantiles([first for _, _, first in rows], n=20)[-1],
    }


def at_once(log: str) -> int:
    """The most that ran in one pass, by the `log` of a server."""
    return max(map(int, _RUNS.findall(log)), default=0)


def measure(workload: str, folder: Path, budget_mb: int, seed: int) -> dict[str, Any]:
    spec = float32_spec(folder)
    result: dict[str, Any] = {"workload": workload, "budget_mb": budget_mb, "seed": seed, "servers": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for name, (launcher, flags) in servers(spec, budget_mb * 10**6).items():
            log = Path(scratch) / f"{name}.log"
            with Server(folder, flags, log=log, environment=ENVIRONMENT, launcher=launcher) as server:
                server.wait_ready()
                client = Client(server)
                client.ask(words(random.Random(0), 300), 4)
                found = crowd(client, workload, seed)
            result["servers"][name] = {"flags": flags, **found, "at_once": at_once(log.read_text(errors="replace"))}
            print(workload, name, result["servers"][name], flush=True)
    result["unbounded_hit_rate"] = predicted(endless(spec), workload, seed, int(found["requests"]))[0]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=["agents", "fewshot"], choices=list(SESSIONS))
    parser.add_argument("--budget-mb", type=int, default=24)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    options = parser.parse_args()
    head = provenance.head("sglang", "torch", "sglang-hybrid")
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.build(Path(scratch) / PRESET, PRESET)
        for workload in options.workload:
            found = measure(workload, folder, options.budget_mb, options.seed)
            if not options.dry:
                print(provenance.write("serving", f"crowd-{workload}", {**head, "model": PRESET, **found}))


if __name__ == "__main__":
    main()
