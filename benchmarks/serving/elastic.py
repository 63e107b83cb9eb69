"""Elastic against static memory: short chats, then long documents, then short chats, over the same bytes.

    python -m benchmarks.serving.elastic --part shifting [--repeats N] [--budget-mb MB] [--drafts]
    python -m benchmarks.serving.elastic --part steady [--rounds N]
    python -m benchmarks.serving.elastic --part resident
    python -m benchmarks.serving.elastic --part stalls [--repeats N]

shifting  Static servers split the bytes by SGLang's ratio of states to KV (0.9 is its default). The servers run side by
          side and take turns phase by phase; every phase asks every server the same requests, eight at a time. With
          --drafts the model's head drafts on all of them; what its candidates hold comes on top of the bytes.
steady    an elastic and a static server in turn, many short rounds of one prefill and one decode that fit easily and
          find their memory mapped: nothing moves. Paired ratios.
resident  an elastic server is filled, left alone, flushed and left alone: resident memory against the account.
stalls    the shifting load on two elastic servers, one without the thread that creates memory ahead: how long mapping,
          unmapping and the growth of a pool kept the scheduler, by its own telemetry.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.servers import ENVIRONMENT, Client, elastic, float32_spec, median_of, scheduler, split, words
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from sglang_hybrid.demo.speculation import MTP
from sglang_hybrid.engine.pools import remote
from sglang_hybrid.engine.speculation.checks import candidate_bytes

RATIOS = (0.9, 0.5, 0.2)
COMMON = ("--max-running-requests", "8", "--chunked-prefill-size", "512", "--hybrid-memory-idle-s", "1")
AT_ONCE = 8  # as COMMON has it
HEAD, VERIFIED = ("--speculative-algorithm", "NEXTN"), 4
CHATS, TURNS, SYSTEM, MESSAGE, ANSWER = 24, 3, 128, 40, 8
DOCUMENTS, DOCUMENT, QUESTIONS, QUESTION = 3, 3000, 3, 40
IDLE_S = 4.0
PARTS = ("shifting", "stalls", "steady", "resident")
QUANTILES = {"p50": "seconds_p50", "p99": "seconds_p99", "p99_processor": "processor_seconds_p99"}
ON_DEMAND = Path(__file__).parent / "on_demand"
PATIENCE_S = 1200.0
WARM_UP, PREFILL, DECODE = 10, 1024, 32
FILL, RESIDENT_IDLE_S = 40, 8.0


def server_flags(name: str, budget_bytes: int, spec: Any, drafts: bool) -> list[str]:
    """Flags of the server `name`: 'elastic', or 'static-R' for a ratio R of states to KV."""
    common, token_bytes, taken_bytes = list(COMMON), spec.kv_bytes_per_token, 0
    if drafts:
        common += HEAD
        token_bytes += spec.head_kv_bytes_per_token
        taken_bytes = candidate_bytes(VERIFIED, AT_ONCE, spec.checkpoint_bytes)
    if name == "elastic":
        return [*common, *elastic(budget_bytes + taken_bytes)]
    return [*common, *split(budget_bytes, float(name.split("-")[1]), spec.checkpoint_bytes, token_bytes)]


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


def shifting(clients: dict[str, Client], repeats: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One row per (repeat, phase, server), and resident bytes over time."""
    rows, noted, begin = [], [], time.monotonic()

    def note(name: str, when: str) -> None:
        at = time.monotonic() - begin
        rss = scheduler(clients[name].server).memory_info().rss
        noted.append({"server": name, "when": when, "at_s": at, "resident_bytes": rss})

    names = list(clients)
    for repeat in range(repeats):
        for name in names:
            clients[name].flush()
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
        clients[name].flush()
    time.sleep(IDLE_S)
    for name in names:
        note(name, "end: flushed and idle")
    return rows, noted


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


def steady(clients: dict[str, Client], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Single requests in turn on servers with memory to spare: tokens per second of prefill and decode."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
    names = list(clients)
    for number in range(-WARM_UP, rounds):
        if number % WARM_UP == 0:
            for name in names:
                clients[name].flush()  # what the last rounds used is free again, and mapped
        for name in names[number % 2 :] + names[: number % 2]:
            rng = random.Random(number)
            first = clients[name].ask(words(rng, PREFILL), 1)
            answer = clients[name].ask(words(rng, 64), DECODE)
            row = {
                "prefill": PREFILL / first["ttft_s"],
                "decode": (DECODE - 1) / (answer["total_s"] - answer["ttft_s"]),
            }
            if number >= 0:
                samples[name].append(row)
    return samples


def resident(client: Client) -> list[dict[str, Any]]:
    """Resident memory of the scheduler beside the account's, twice a second, while memory fills and empties again."""
    rows: list[dict[str, Any]] = []
    done, when = threading.Event(), [""]
    process, begin = scheduler(client.server), time.monotonic()

    def watch() -> None:
        while not done.wait(0.5):
            before = process.memory_info().rss
            found = account(client)
            rows.append({"at_s": time.monotonic() - begin, "when": when[0], "rss": before, **found})

    fill(client, FILL, seed=1)  # once before, so that everything else a load makes resident is
    client.flush()
    time.sleep(RESIDENT_IDLE_S)
    watcher = threading.Thread(target=watch)
    watcher.start()
    parts = {"idle": lambda: None, "load": lambda: fill(client, FILL, seed=2), "flushed": client.flush}
    for when[0], act in parts.items():
        act()
        time.sleep(RESIDENT_IDLE_S)
    done.set()
    watcher.join()
    return rows


def fill(client: Client, prompts: int, seed: int) -> None:
    """Documents nobody asked about before, four at a time."""
    rng = random.Random(seed)
    texts = [words(rng, 2000) for _ in range(prompts)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: client.ask(text, 4), texts))


def account(client: Client) -> dict[str, float]:
    """Bytes that the elastic pools say are resident, and in use."""
    found = remote.read(urllib.request.urlopen(client.server.url + "/metrics", timeout=60).read().decode())
    size = found["granule_bytes", ""]
    used = sum(value for (name, _), value in found.items() if name == "granules_used")
    return {"account_resident": size * found["granules_resident", ""], "account_used": size * used}


def agreement(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How far the resident set is from the account, both counted from the first row, and how fast it falls."""
    base = rows[0]["rss"] - rows[0]["account_resident"]
    ends = {row["when"]: row for row in rows}  # the last row of each part
    off = {when: (row["rss"] - base - row["account_resident"]) / 1e6 for when, row in ends.items()}
    flushed = [row for row in rows if row["when"] == "flushed"]
    half = (ends["load"]["rss"] + flushed[-1]["rss"]) / 2
    fell = next(row["at_s"] for row in flushed if row["rss"] <= half)
    return {
        "peak_account_mb": max(row["account_resident"] for row in rows) / 1e6,
        "peak_rss_over_start_mb": (max(row["rss"] for row in rows) - rows[0]["rss"]) / 1e6,
        "after_flush_account_mb": flushed[-1]["account_resident"] / 1e6,
        "after_flush_rss_over_start_mb": (flushed[-1]["rss"] - rows[0]["rss"]) / 1e6,
        "seconds_from_flush_to_half": fell - flushed[0]["at_s"],
        **{f"rss_less_account_mb, end of '{when}'": value for when, value in off.items()},
    }


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
    return {kind: median_of([a[kind] / b[kind] for a, b in pairs]) for kind in ("prefill", "decode")}


def start(
    folder: Path, logs: Path, stack: ExitStack, servers: dict[str, list[str]], extra: dict[str, str] | None = None
) -> dict[str, Client]:
    environment = {**ENVIRONMENT, **(extra or {})}
    clients = {
        name: Client(stack.enter_context(Server(folder, flags, log=logs / f"{name}.log", environment=environment)))
        for name, flags in servers.items()
    }
    for client in clients.values():
        client.server.wait_ready(PATIENCE_S)
    return clients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=180, help="of the steady part, about 1.6 seconds each")
    parser.add_argument("--budget-mb", type=float, default=7.0)
    parser.add_argument("--drafts", action="store_true", help="of the shifting part: the model's head drafts")
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.build(Path(scratch) / "gdn", "gdn")
        budget_bytes = int(options.budget_mb * 1e6)
        if options.part in ("shifting", "all"):
            drafting = model.build(Path(scratch) / MTP, MTP) if options.drafts else folder
            measure_shifting(drafting, Path(scratch), budget_bytes, options.repeats)
        if options.part in ("stalls", "all"):
            measure_stalls(folder, Path(scratch), budget_bytes, options.repeats)
        if options.part in ("steady", "all"):
            measure_steady(folder, Path(scratch), options.rounds)
        if options.part in ("resident", "all"):
            measure_resident(folder, Path(scratch))


def measure_shifting(folder: Path, logs: Path, budget_bytes: int, repeats: int) -> None:
    spec = float32_spec(folder)
    drafts = folder.name == MTP
    names = ["elastic", *(f"static-{ratio}" for ratio in RATIOS)]
    servers = {name: server_flags(name, budget_bytes, spec, drafts) for name in names}
    with ExitStack() as stack:
        rows, noted = shifting(start(folder, logs, stack, servers), repeats)
    settings = {"model": folder.name, "budget_bytes": budget_bytes, "servers": servers, "repeats": repeats}
    name = "elastic-drafts" if drafts else "elastic"
    publish(name, settings, summarise(rows, noted), {"rows": rows, "resident": noted})


def measure_stalls(folder: Path, logs: Path, budget_bytes: int, repeats: int) -> None:
    flags = [*COMMON, *elastic(budget_bytes), "--enable-metrics"]
    with ExitStack() as stack:
        clients = start(folder, logs, stack, {"ahead": flags})
        baseline = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ON_DEMAND), os.environ.get("PYTHONPATH"))))}
        clients |= start(folder, logs, stack, {"on demand": flags}, baseline)
        rows, noted = shifting(clients, repeats)
        found = {name: telemetry(client) for name, client in clients.items()}
    settings = {"model": "gdn", "budget_bytes": budget_bytes, "flags": flags, "repeats": repeats}
    publish("elastic-stalls", settings, found, {"rows": rows, "resident": noted})


def telemetry(client: Client) -> dict[str, dict[str, float]]:
    """Calls, milliseconds and processor milliseconds by what was done."""
    found = remote.read(urllib.request.urlopen(client.server.url + "/metrics", timeout=60).read().decode())
    return {
        kind: {
            "calls": found["calls", kind],
            "granules": found["granules_moved", kind],
            **{f"{name}_ms": 1e3 * found[f"{key}", kind] for name, key in QUANTILES.items()},
        }
        for kind in ("map", "unmap", "grow")
    }


def measure_steady(folder: Path, logs: Path, rounds: int) -> None:
    servers = {"elastic": ["--hybrid-memory", "elastic", "--hybrid-memory-idle-s", "60"], "static": []}
    with ExitStack() as stack:
        moves = steady(start(folder, logs, stack, servers), rounds)
    settings = {"model": "gdn", "servers": servers, "rounds": rounds, "prefill": PREFILL, "decode": DECODE}
    publish("elastic-steady", settings, compare(moves), {"rows": moves})


def measure_resident(folder: Path, logs: Path) -> None:
    servers = {"elastic": ["--hybrid-memory", "elastic", "--hybrid-cpu-memory-gb", "0.064", "--hybrid-memory-idle-s",
                           "2", "--enable-metrics"]}  # fmt: skip
    with ExitStack() as stack:
        rows = resident(start(folder, logs, stack, servers)["elastic"])
    settings = {"model": "gdn", "servers": servers, "documents": FILL}
    publish("elastic-resident", settings, agreement(rows), {"rows": rows})


def publish(name: str, settings: dict[str, Any], summary: dict[str, Any], raw: dict[str, Any]) -> None:
    print(json.dumps(summary, indent=1))
    head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid")
    seed = {"seed": "by repeat and phase", "columns": "benchmarks/serving/README.md"}
    print(provenance.write("serving", name, {**head, **settings, **seed, "summary": summary, **raw}))


if __name__ == "__main__":
    main()
