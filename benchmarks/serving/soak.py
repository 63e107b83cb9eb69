"""Minutes of shifting load while states and KV are scarce: every request ends, no token is wrong, nothing is lost.

    python -m benchmarks.serving.soak [--memory elastic] [--strategy extra_buffer ...] [--preset gdn ...]

First a server without a cache answers a fixed set of prompts (conversations, documents, odd lengths). Then a server
with less memory than the set needs answers prompts drawn from it, phase by phase with other weights, six at a time,
while rude clients hang up and abort, the cache is flushed and the weights are loaded anew now and then, and elastic
memory is told to give memory back.
Every answer is compared with the first server's; where they differ, transformers says whether it was a tie. At the end
the server must be able to free everything: it serves a prompt as large as its memory, and after a flush uses none.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.servers import elastic, float32_spec, scheduler
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from tests.engine.prompts import prompts as odd_lengths
from tests.engine.prompts import words
from tests.engine.support import Client, Reference

RUNNING, STATES, TOKENS = 6, 26, 5_000
PHASE_S, SAMPLE_S, PATIENCE_S = 30.0, 10.0, 1200.0
PHASES = {  # weights of conversations, documents and odd lengths
    "chat": (1.0, 0.0, 0.1),
    "documents": (0.1, 1.0, 0.0),
    "odd lengths": (0.0, 0.1, 1.0),
    "mixed": (0.4, 0.3, 0.3),
}
ENVIRONMENT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "OMP_NUM_THREADS": "1"}
COMPLAINTS = "Traceback|leak detected|does not add up|AssertionError"


@dataclass(frozen=True)
class Question:
    """A prompt, how many tokens to answer with, and the answer of the server without a cache."""

    prompt: list[int]
    tokens: int
    answer: list[int]


@dataclass
class Tally:
    """What became of the requests; one lock, many threads."""

    counts: Counter[str] = field(default_factory=Counter)
    different: list[tuple[Question, list[int]]] = field(default_factory=list)
    unclean: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **counts: int) -> None:
        with self.lock:
            self.counts.update(counts)

    def answered(self, question: Question, output: list[int], hit: int) -> None:
        """Count an answer, and keep it if it is not the one of the server without a cache."""
        equal = output == question.answer
        self.add(
            answered=1, prompt_tokens=len(question.prompt), cached_tokens=hit, output_tokens=len(output), equal=equal
        )
        if not equal:
            with self.lock:
                self.different.append((question, output))


def questions(client: Client, seed: int) -> dict[str, list[Question]]:
    """The set, answered by a server without a cache; turns of conversations contain its answers."""
    rng = random.Random(seed)

    def asked(prompts: list[list[int]], low: int, high: int) -> list[Question]:
        lengths = [rng.randint(low, high) for _ in prompts]
        with ThreadPoolExecutor(RUNNING) as pool:
            pairs = zip(prompts, lengths, strict=True)
            answers = pool.map(lambda pair: client.generate(*pair, timeout=PATIENCE_S)[0], pairs)
        return [Question(*each) for each in zip(prompts, lengths, answers, strict=True)]

    systems = [words(rng, n) for n in (64, 150, 400)]
    turn = asked([rng.choice(systems) + words(rng, rng.randint(5, 80)) for _ in range(16)], 4, 48)
    chats = list(turn)
    for _ in range(4):
        turn = asked([q.prompt + q.answer + words(rng, rng.randint(5, 80)) for q in turn], 4, 48)
        chats += turn
    texts = [words(rng, rng.randint(900, 2600)) for _ in range(8)]
    documents = asked([text + words(rng, rng.randint(1, 60)) for text in texts for _ in range(3)], 4, 24)
    return {"chat": chats, "documents": documents, "odd lengths": asked(odd_lengths(seed, 100), 1, 32)}


def ask(client: Client, question: Question, tally: Tally) -> None:
    """One request of a well-behaved client."""
    try:
        output, hit = client.generate(question.prompt, question.tokens, timeout=PATIENCE_S)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:300]
        clean = text.startswith("{") and "error" in text  # said what was wrong, in the protocol
        tally.add(**{"clean errors" if clean else "unclean errors": 1})
        if not clean:
            tally.unclean.append(f"{error.code}: {text}")
        return
    except OSError as error:
        tally.add(lost=1)
        tally.unclean.append(f"{type(error).__name__}: {error}")
        return
    tally.answered(question, output, hit)


def be_rude(client: Client, stop: threading.Event, seed: int, tally: Tally) -> None:
    """Hang up in mid-prefill and in mid-decode, and abort; once for every few answers others got."""
    rng, number, answered = random.Random(seed), 0, 0
    while not stop.wait(rng.uniform(0.2, 1.0)):
        if tally.counts["answered"] < answered:
            continue
        number, answered = number + 1, tally.counts["answered"] + rng.randint(2, 8)
        prompt, rid = words(rng, rng.choice((30, 300, 1500))), f"rude-{seed}-{number}"
        body = {"input_ids": prompt, "rid": rid, "sampling_params": {"max_new_tokens": 80, "ignore_eos": True}}
        aborts = rng.random() < 0.5
        if aborts:
            threading.Timer(rng.uniform(0.05, 0.8), quietly, (client, "/abort_request", {"rid": rid})).start()
        try:
            client.post("/generate", body, timeout=60 if aborts else rng.uniform(0.05, 0.8))
            tally.add(rude_served=1)
        except urllib.error.HTTPError:
            tally.add(rude_refused=1)
        except OSError:
            tally.add(hung_up=1)


def quietly(client: Client, path: str, body: dict[str, Any]) -> bool:
    """Whether the server did it."""
    try:
        client.post(path, body, timeout=60)
    except OSError:
        return False
    return True


def work(client: Client, pool: dict[str, list[Question]], stop: threading.Event, phase: list[str], seed: int,
         tally: Tally) -> None:  # fmt: skip
    """Draw and ask until told to stop; a conversation or document is often asked about again soon."""
    rng, kinds = random.Random(seed), list(pool)
    while not stop.is_set():
        (kind,) = rng.choices(kinds, PHASES[phase[0]])
        window = len(pool[kind]) // 2 or 1  # each phase works on one half of the set, which moves
        start = int(time.monotonic() / PHASE_S) * 7 % len(pool[kind])
        ask(client, pool[kind][(start + rng.randrange(window)) % len(pool[kind])], tally)


def metrics(client: Client) -> dict[str, float]:
    """The server's gauges of memory; those of elastic memory too."""
    text = urllib.request.urlopen(client.server.url + "/metrics", timeout=60).read().decode()
    found = re.findall(
        r"^sglang:(elastic_memory_\w+|num_used_tokens|token_usage|mamba_usage|num_running_reqs|num_queue_reqs)"
        r"(?:\{([^}]*)\})? (\S+)$", text, re.MULTILINE)  # fmt: skip
    kinds = [(name, re.search(r'kind="(\w+)"', labels)) for name, labels, _ in found]
    return {f"{name}.{kind[1]}" if kind else name: float(v) for (name, kind), (*_, v) in zip(kinds, found, strict=True)}


def flags(options: argparse.Namespace, folder: Path) -> list[str]:
    """Less memory than the load wants: the same bytes as pools of fixed sizes, or as one budget."""
    spec = float32_spec(folder)
    common = ["--max-running-requests", str(RUNNING), "--chunked-prefill-size", "512", "--enable-metrics",
              "--mamba-radix-cache-strategy", options.strategy, "--hybrid-log-interval-s", "30",
              "--hybrid-cpu-event-loop", options.event_loop]  # fmt: skip
    common += ["--tp-size", str(options.ranks)] if options.ranks > 1 else []
    if options.host_tier:
        common += ["--enable-hierarchical-cache", "--hicache-ratio", str(options.host_tier)]
    if options.memory == "static":
        return [*common, "--max-mamba-cache-size", str(STATES), "--max-total-tokens", str(TOKENS)]
    budget_bytes = STATES * spec.checkpoint_bytes + TOKENS * spec.kv_bytes_per_token
    return [*common, *elastic(budget_bytes), "--hybrid-memory-idle-s", "1"]


def load(client: Client, folder: Path, pool: dict[str, list[Question]], options: argparse.Namespace,
         tally: Tally) -> list[Any]:  # fmt: skip
    """Run the phases; one row of counts and memory every SAMPLE_S seconds."""
    stop, phase, rng = threading.Event(), ["chat"], random.Random(options.seed)
    threads = [
        threading.Thread(target=work, args=(client, pool, stop, phase, options.seed + i, tally)) for i in range(RUNNING)
    ] + [threading.Thread(target=be_rude, args=(client, stop, 900 + i, tally)) for i in range(2)]
    for thread in threads:
        thread.start()
    process, begin, rows = scheduler(client.server), time.monotonic(), []
    while (at := time.monotonic() - begin) < 60 * options.minutes and process.is_running():
        phase[0] = list(PHASES)[int(at / PHASE_S) % len(PHASES)]
        time.sleep(SAMPLE_S)
        if rng.random() < 0.05:
            quietly(client, "/flush_cache", {})
            tally.add(flushes=1)
        if rng.random() < 0.05:
            updated = quietly(client, "/update_weights_from_disk", {"model_path": str(folder)})
            tally.add(**{"weights_updates" if updated else "weights_updates_refused": 1})
        if options.memory == "elastic" and rng.random() < 0.05:
            quietly(client, "/release_memory_occupation", {"tags": ["kv_cache"]})
            quietly(client, "/resume_memory_occupation", {"tags": ["kv_cache"]})
            tally.add(releases=1)
        rss = process.memory_info().rss if process.is_running() else 0
        rows.append({"at_s": round(at, 1), "phase": phase[0], "rss": rss, **tally.counts, **memory_columns(client)})
        print(json.dumps(rows[-1]), flush=True)
    stop.set()
    for thread in threads:
        thread.join()
    return rows


def memory_columns(client: Client) -> dict[str, float]:
    try:
        found = metrics(client)
    except OSError:
        return {}
    names = ("granules_used.kv", "granules_used.state", "granules_resident", "waits", "transfers")
    return {name: found[f"elastic_memory_{name}"] for name in names if f"elastic_memory_{name}" in found}


def settle(client: Client, memory: str) -> dict[str, Any]:
    """What is left once nobody asks: all of it evictable, and nothing after a flush."""
    log = client.server.log.read_text()
    reach = int(re.findall(r"max_total_num_tokens=(\d+)", log)[-1])
    rng = random.Random(0)
    time.sleep(5)
    largest = words(rng, min(reach, TOKENS) - 256)
    answered = len(client.generate(largest, 4, PATIENCE_S)[0]) == 4
    time.sleep(3)
    before = metrics(client)
    flush(client)
    client.generate(words(rng, 3), 1, PATIENCE_S)  # a pass, so that the gauges are written
    flush(client)
    time.sleep(5)
    after = metrics(client)
    result = {"largest_prompt_tokens": len(largest), "largest_answered": answered, "idle": before, "flushed": after}
    if memory == "elastic":
        pinned = after["elastic_memory_granules_pinned"]
        used = after["elastic_memory_granules_used.kv"] + after["elastic_memory_granules_used.state"]
        result["exact"] = used == pinned == after["elastic_memory_granules_resident"]
    else:
        result["exact"] = True  # the server's own check after every batch and on idle, below in `complaints`
    return result


def flush(client: Client) -> None:
    """SGLang refuses while a request runs: what a rude client left behind may still."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return client.flush()
        except urllib.error.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def judge(tally: Tally, folder: Path) -> dict[str, int]:
    """Ties and wrong answers among those that differ."""
    verdict = {"ties": 0, "wrong": 0}
    reference = Reference(folder) if tally.different else None
    for question, output in tally.different:
        assert reference is not None
        try:
            reference.assert_same(question.prompt, output, question.answer)
            verdict["ties"] += 1
        except (AssertionError, ValueError) as error:
            verdict["wrong"] += 1
            print(error, flush=True)
    return verdict


def soak(folder: Path, options: argparse.Namespace, pool: dict[str, list[Question]], head: dict[str, Any]) -> None:
    """One server under load, judged and published."""
    tally, log_file = Tally(), folder.with_suffix(".log")
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(options.ranks)))} if options.ranks > 1 else {}
    with Server(folder, flags(options, folder), log=log_file, environment={**ENVIRONMENT, **cores}) as server:
        server.wait_ready(PATIENCE_S)
        client = Client(server)
        pid = scheduler(client.server).pid
        rows = load(client, folder, pool, options, tally)
        alive = server.process.poll() is None and scheduler(client.server).pid == pid
        end = settle(client, options.memory) if alive else {}
        log = server.log.read_text()
    if options.keep_log is not None:
        options.keep_log.write_text(log)
    verdict = judge(tally, folder)
    complaints = sorted({line[:200] for line in log.splitlines() if re.search(COMPLAINTS, line)})
    summary = {"alive": alive, **tally.counts, **verdict, "exact": end.get("exact"), "complaints": complaints,
               "unclean": tally.unclean[:10]}  # fmt: skip
    print(json.dumps(summary, indent=1), flush=True)
    if not options.dry:
        name = f"soak-{options.memory}-{options.preset}-{options.strategy}"
        name += "-overlap" if options.event_loop == "overlap" else ""
        name += "-host-tier" * bool(options.host_tier) + "-ranks" * (options.ranks > 1)
        settings = {key: value for key, value in vars(options).items() if key not in ("dry", "keep_log")}
        result = {**head, **settings, "states": STATES, "kv_tokens": TOKENS, "columns": "benchmarks/serving/README.md"}
        print(provenance.write("serving", name, {**result, "summary": summary, "end": end, "rows": rows}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["gdn"], choices=("gdn", "mamba2"))
    parser.add_argument("--strategy", nargs="+", default=["extra_buffer"], choices=("extra_buffer", "no_buffer"))
    parser.add_argument("--event-loop", default="normal", choices=("normal", "overlap"), help="of the scheduler")
    parser.add_argument("--memory", default="elastic", choices=("elastic", "static"))
    parser.add_argument("--host-tier", type=float, default=0, help="HiCache behind it, so many times as large")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks, a core each")
    parser.add_argument("--minutes", type=float, default=30, help="of load, for each preset and strategy")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    parser.add_argument("--keep-log", type=Path, default=None, help="copy the server's log to this file")
    options = parser.parse_args()
    head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid")
    with tempfile.TemporaryDirectory() as scratch:
        for preset in options.preset:
            folder = model.build(Path(scratch) / preset, preset)
            off = ("--disable-radix-cache", "--max-running-requests", str(RUNNING), "--chunked-prefill-size", "512")
            with Server(folder, off, log=Path(scratch) / "off.log", environment=ENVIRONMENT) as server:
                server.wait_ready(PATIENCE_S)
                pool = questions(Client(server), options.seed)
            for strategy in options.strategy:
                one = argparse.Namespace(**{**vars(options), "preset": preset, "strategy": strategy})
                soak(folder, one, pool, head)


if __name__ == "__main__":
    main()
