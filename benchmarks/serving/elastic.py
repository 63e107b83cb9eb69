"""Elastic against static memory: short chats, then long documents, then short chats, over the same bytes.

    python benchmarks/serving/elastic.py [--repeats N] [--budget-mb MB]

Static servers split the bytes by SGLang's ratio of states to KV (0.9 is its default). The servers run side by side and
take turns phase by phase; every phase asks every server the same requests, eight at a time. A second part asks an
elastic and a static server in turn for single prefills and decodes that fit easily, where nothing moves.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import provenance
import psutil
from servers import ENVIRONMENT, Client, words

from sglang_hybrid.core.spec import from_config
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server

RATIOS = (0.9, 0.5, 0.2)
COMMON = ("--max-running-requests", "8", "--chunked-prefill-size", "512", "--hybrid-memory-idle-s", "1")
AT_ONCE = 8
CHATS, TURNS, SYSTEM, MESSAGE, ANSWER = 24, 3, 128, 40, 8
DOCUMENTS, DOCUMENT, QUESTIONS, QUESTION = 3, 3000, 3, 40
IDLE_S = 4.0


def server_flags(name: str, budget_bytes: int, spec: Any) -> list[str]:
    """Flags of the server `name`: 'elastic', or 'static-R' for a ratio R of states to KV."""
    if name == "elastic":
        return [*COMMON, "--hybrid-memory", "elastic", "--hybrid-cpu-memory-gb", str(budget_bytes / 1e9)]
    ratio = float(name.split("-")[1])
    states = int(budget_bytes * ratio / (1 + ratio)) // spec.checkpoint_bytes
    tokens = (budget_bytes - states * spec.checkpoint_bytes) // spec.kv_bytes_per_token
    return [*COMMON, "--max-mamba-cache-size", str(states), "--max-total-tokens", str(tokens)]


def chats(client: Client, seed: int) -> list[dict[str, Any]]:
    """Conversations that share one of three system prompts; every turn waits for its answer, all conversations mix."""
    rng = random.Random(seed)
    systems = [words(rng, SYSTEM) for _ in range(3)]
    histories = [rng.choice(systems) + words(rng, MESSAGE) for _ in range(CHATS)]
    rows = []
    for _ in range(TURNS):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda history: ask(client, history), histories))
        rows += [row for row, _ in answers]
        histories = [h + output + words(rng, MESSAGE) for h, (_, output) in zip(histories, answers, strict=True)]
    return rows


def documents(client: Client, seed: int) -> list[dict[str, Any]]:
    """Questions about a few long documents, round after round."""
    rng = random.Random(seed)
    texts = [words(rng, DOCUMENT) for _ in range(DOCUMENTS)]
    asked = [text + words(rng, QUESTION) for _ in range(QUESTIONS) for text in texts]
    rows = []
    for start in range(0, len(asked), DOCUMENTS):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            rows += [row for row, _ in pool.map(lambda prompt: ask(client, prompt), asked[start : start + DOCUMENTS])]
    return rows


def ask(client: Client, prompt: list[int]) -> tuple[dict[str, Any], list[int]]:
    answer = client.ask(prompt, ANSWER)
    row = {"prompt_tokens": len(prompt), "cached_tokens": answer["cached_tokens"], "total_s": answer["total_s"]}
    return row, answer["output_ids"]


PHASES: dict[str, Callable[[Client, int], list[dict[str, Any]]]] = {
    "short-chat": chats, "long-document": documents, "short-chat-again": chats,
}  # fmt: skip


def resident_bytes(client: Client) -> int:
    """Resident memory of the scheduler process."""
    family = psutil.Process(client.server.process.pid).children(recursive=True)
    return int(next(process for process in family if "scheduler" in process.name()).memory_info().rss)


def shifting(clients: dict[str, Client], repeats: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One row per (repeat, phase, server), and resident bytes over time."""
    rows, resident, begin = [], [], time.monotonic()

    def note(name: str, when: str) -> None:
        at = time.monotonic() - begin
        resident.append({"server": name, "when": when, "at_s": at, "resident_bytes": resident_bytes(clients[name])})

    names = list(clients)
    for repeat in range(repeats):
        for name in names:
            flush(clients[name])
        time.sleep(IDLE_S)
        for name in names:
            note(name, f"{repeat}: flushed and idle")
        for number, (phase, run) in enumerate(PHASES.items()):
            for name in names[(repeat + number) % len(names) :] + names[: (repeat + number) % len(names)]:
                start = time.monotonic()
                asked = run(clients[name], 1000 * repeat + number)
                seconds = time.monotonic() - start
                rows.append({"repeat": repeat, "phase": phase, "server": name, **total(asked, seconds)})
                note(name, f"{repeat}: after {phase}")
                print(json.dumps(rows[-1]), flush=True)
    for name in names:
        flush(clients[name])
    time.sleep(IDLE_S)
    for name in names:
        note(name, "end: flushed and idle")
    return rows, resident


def total(asked: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    prompt = sum(row["prompt_tokens"] for row in asked)
    return {
        "seconds": seconds,
        "completed": len(asked),
        "requests_per_s": len(asked) / seconds,
        "tokens_per_s": (prompt + ANSWER * len(asked)) / seconds,
        "computed_tokens": prompt - sum(row["cached_tokens"] for row in asked),
        "prompt_tokens": prompt,
    }


def flush(client: Client) -> None:
    request = urllib.request.Request(client.server.url + "/flush_cache", b"", method="POST")
    urllib.request.urlopen(request, timeout=60).read()


def steady(clients: dict[str, Client], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Single requests in turn on servers with memory to spare: tokens per second of prefill and decode."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
    names = list(clients)
    for repeat in range(repeats + 2):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            rng = random.Random(repeat)
            first = clients[name].ask(words(rng, 1024), 1)
            answer = clients[name].ask(words(rng, 64), 96)
            row = {"prefill": 1024 / first["ttft_s"], "decode": 95 / (answer["total_s"] - answer["ttft_s"])}
            if repeat >= 2:  # the first two warm every code path up
                samples[name].append(row)
    return samples


def summarise(rows: list[dict[str, Any]], resident: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over repeats by phase and server, the whole by server, and resident bytes."""
    servers = list(dict.fromkeys(row["server"] for row in rows))
    repeats = sorted({row["repeat"] for row in rows})
    keys = ("requests_per_s", "tokens_per_s", "computed_tokens")
    by_phase = {
        phase: {
            name: {
                key: statistics.median(r[key] for r in rows if (r["phase"], r["server"]) == (phase, name))
                for key in keys
            }
            for name in servers
        }
        for phase in PHASES
    }
    whole = {}
    for name in servers:
        per_repeat = [[r for r in rows if (r["repeat"], r["server"]) == (repeat, name)] for repeat in repeats]
        whole[name] = {
            "requests_per_s": statistics.median(
                sum(r["completed"] for r in one) / sum(r["seconds"] for r in one) for one in per_repeat
            ),
            "computed_tokens": statistics.median(sum(r["computed_tokens"] for r in one) for one in per_repeat),
        }
    peak = {n: max(r["resident_bytes"] for r in resident if r["server"] == n) for n in servers}
    last = {n: [r["resident_bytes"] for r in resident if r["server"] == n][-1] for n in servers}
    return {"by_phase": by_phase, "whole": whole, "resident_peak_bytes": peak, "resident_after_flush_bytes": last}


def compare(moves: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Paired ratios of elastic to static where nothing moves."""
    pairs = list(zip(moves["elastic"], moves["static"], strict=True))
    return {kind: ratio([a[kind] / b[kind] for a, b in pairs]) for kind in ("prefill", "decode")}


def ratio(pairs: list[float]) -> dict[str, float]:
    """Median of paired ratios with the 95 % interval of a bootstrap over pairs."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return {"median": statistics.median(pairs), "low": medians[50], "high": medians[1949]}


def start(folder: Path, logs: Path, stack: ExitStack, servers: dict[str, list[str]]) -> dict[str, Client]:
    clients = {
        name: Client(
            stack.enter_context(Server(folder, flags, log=logs / f"{name}.log", environment=dict(ENVIRONMENT)))
        )
        for name, flags in servers.items()
    }
    for client in clients.values():
        client.server.wait_ready()
    return clients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steady-repeats", type=int, default=20)
    parser.add_argument("--budget-mb", type=float, default=7.0)
    parser.add_argument("--part", choices=("shifting", "steady", "both"), default="both")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.build(Path(scratch) / "gdn", "gdn")
        if options.part != "steady":
            measure_shifting(folder, Path(scratch), int(options.budget_mb * 1e6), options.repeats)
        if options.part != "shifting":
            measure_steady(folder, Path(scratch), options.steady_repeats)


def measure_shifting(folder: Path, logs: Path, budget_bytes: int, repeats: int) -> None:
    spec = from_config(json.loads((folder / "config.json").read_text())).with_dtypes(
        kv_dtype="float32", conv_dtype="float32"
    )
    servers = {
        name: server_flags(name, budget_bytes, spec) for name in ["elastic", *(f"static-{ratio}" for ratio in RATIOS)]
    }
    with ExitStack() as stack:
        rows, resident = shifting(start(folder, logs, stack, servers), repeats)
    settings = {"model": "gdn", "budget_bytes": budget_bytes, "servers": servers, "repeats": repeats}
    publish("elastic", settings, summarise(rows, resident), {"rows": rows, "resident": resident})


def measure_steady(folder: Path, logs: Path, repeats: int) -> None:
    servers = {"elastic": ["--hybrid-memory", "elastic"], "static": []}
    with ExitStack() as stack:
        moves = steady(start(folder, logs, stack, servers), repeats)
    publish("elastic-steady", {"model": "gdn", "servers": servers, "repeats": repeats}, compare(moves), {"rows": moves})


def publish(name: str, settings: dict[str, Any], summary: dict[str, Any], raw: dict[str, Any]) -> None:
    print(json.dumps(summary, indent=1))
    head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid")
    seed = {"seed": "by repeat and phase", "columns": "benchmarks/serving/README.md"}
    print(provenance.write("serving", name, {**head, **settings, **seed, "summary": summary, **raw}))


if __name__ == "__main__":
    main()
