"""Hit rate and time to first token when states are scarce: ours beside both cores of stock SGLang, request by request.

    python -m benchmarks.serving.contention [--preset gdn] [--workload chat ...] [--seed 21]

Four workloads of several sessions that take turns; each server gets the same prompts in the same order, one at a time,
and turns alternate between servers, so that the ratios are paired. `predicted` is the hit rate of a simulated server of
the same sizes for the same prompts; `unbounded` that of one with endless memory.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import provenance
from benchmarks.serving.servers import Client, Command, hybrid, stock, words
from sglang_hybrid.core.spec import ModelSpec, engine_dtypes, from_config
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.shape import Shape

GRID = 64
RUNNING = 4
SIZES = {"chat": (28, 250_000), "agents": (26, 250_000), "fewshot": (28, 250_000), "rag": (40, 600_000)}
"""Workload -> state slots, tokens of KV."""
SESSIONS = {"chat": 40, "agents": 28, "fewshot": 1000, "rag": 400}
"""So many that what nobody has seen before is not what the p95 is about, as far as that goes."""
CHUNK = 2048
"""SGLang's `--chunked-prefill-size` on a CPU."""
ENDLESS = 1 << 24

Prompt = list[int]


class Session:
    """One conversation: `prompt` is what it asks next; `answer` takes the reply and extends it."""

    def __init__(self, rng: random.Random, first: Prompt, turns: int, added: tuple[int, int], reply: int) -> None:
        self._rng, self._left, self._added = rng, turns, added
        self.prompt, self.reply, self.done, self.turn = first, reply, False, 1

    def answer(self, output: Prompt) -> bool:
        """Append the reply and what the user says next; False when the conversation is over."""
        self._left -= 1
        self.turn += 1
        self.prompt = self.prompt + output + words(self._rng, self._rng.randint(*self._added))
        return self._left > 0


def sessions(workload: str, rng: random.Random) -> list[Session]:
    """The sessions of a workload, in order of arrival."""
    count = SESSIONS[workload]
    if workload == "chat":
        systems = [words(rng, n) for n in (400, 700, 1100)]
        return [Session(rng, rng.choice(systems) + words(rng, rng.randint(20, 160)), rng.randint(4, 14), (20, 160), 24)
                for _ in range(count)]  # fmt: skip
    if workload == "agents":
        tools = [words(rng, n) for n in (1200, 2400)]
        return [Session(rng, rng.choice(tools) + words(rng, rng.randint(50, 300)), rng.randint(8, 16), (60, 260), 16)
                for _ in range(count)]  # fmt: skip
    if workload == "fewshot":
        templates = [words(rng, rng.randint(800, 2800)) for _ in range(24)]
        weights = [1 / (rank + 1) for rank in range(24)]
        picks = rng.choices(templates, weights, k=count)
        return [Session(rng, pick + words(rng, rng.randint(20, 80)), 1, (1, 1), 4) for pick in picks]
    instruction = words(rng, 300)
    documents = [words(rng, rng.randint(500, 1600)) for _ in range(40)]
    weights = [1 / (rank + 1) for rank in range(40)]
    made = []
    for _ in range(count):
        chosen = [documents[i] for i in sorted(set(rng.choices(range(40), weights, k=rng.randint(1, 2))))]
        prompt = [*instruction, *(token for document in chosen for token in document), *words(rng, rng.randint(20, 60))]
        made.append(Session(rng, prompt, 1, (1, 1), 8))
    return made


def turns(workload: str, seed: int) -> Iterator[Session]:
    """Sessions in the order they speak: new ones arrive, and a few that are open take turns at random."""
    rng = random.Random(seed)
    waiting, active = sessions(workload, rng), []
    together = 1 if workload in ("fewshot", "rag") else 12
    while waiting or active:
        while waiting and len(active) < together:
            active.append(waiting.pop(0))
        session = rng.choice(active)
        yield session
        if session.done:
            active.remove(session)


def run(workload: str, seed: int, clients: dict[str, Client], requests: int | None = None) -> list[dict[str, Any]]:
    """Ask every server the first `requests` prompts, or all.

    Rows of (server, prompt tokens, cached tokens, seconds to the first token).
    """
    rows, names = [], list(clients)
    for number, session in enumerate(islice(turns(workload, seed), requests)):
        outputs = {}
        prompt = session.prompt
        for name in names[number % len(names) :] + names[: number % len(names)]:
            answer = clients[name].ask(prompt, session.reply)
            outputs[name] = answer["output_ids"]
            rows.append({"request": number, "turn": session.turn, "server": name, "prompt_tokens": len(prompt),
                         "cached_tokens": answer["cached_tokens"], "ttft_s": answer["ttft_s"]})  # fmt: skip
        rows[-1] |= {"tokens": np.array(prompt + outputs["hybrid"], np.int32), "reply": session.reply}
        session.done = not session.answer(outputs["hybrid"])
    return rows


def replies(workload: str, seed: int, requests: int | None = None) -> list[tuple[np.ndarray, int]]:
    """What every request of `run` ends as, and the length of its prompt; replies are drawn, which decides no hit."""
    rng, made = random.Random(seed), []
    for session in islice(turns(workload, seed), requests):
        output = words(rng, session.reply)
        made.append((np.array(session.prompt + output, np.int32), len(session.prompt)))
        session.done = not session.answer(output)
    return made


def endless(spec: ModelSpec) -> SimulatedServer:
    """One that forgets nothing."""
    return SimulatedServer(spec, Shape(ENDLESS, ENDLESS, GRID, chunk_tokens=CHUNK))


def predicted(server: SimulatedServer, workload: str, seed: int, requests: int | None = None) -> tuple[float, float]:
    """Hit rate of a simulated server for the requests of `run`, and the p95 of the tokens that one computes."""
    hits, asked = [], []
    for now, (tokens, n_input) in enumerate(replies(workload, seed, requests)):
        hits.append(server.lookup(tokens[:n_input], float(now)))
        asked.append(n_input)
        server.commit(tokens, n_input, float(now))
    return sum(hits) / sum(asked), float(np.quantile(np.array(asked) - hits, 0.95))


def simulated(workload: str, seed: int, spec: ModelSpec) -> dict[str, float]:
    """What the simulator says of ours, of its size and with endless memory."""
    result = {}
    ours = SimulatedServer(spec, Shape(*SIZES[workload], GRID, chunk_tokens=CHUNK))
    for name, server in (("predicted", ours), ("unbounded", endless(spec))):
        result[f"{name}_hit_rate"], result[f"{name}_computed_p95"] = predicted(server, workload, seed)
    return result


def summary(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    mine = [row for row in rows if row["server"] == name]
    times = sorted(row["ttft_s"] for row in mine)
    later = sorted(row["ttft_s"] for row in mine if row["turn"] > 1) or times
    return {
        "requests": len(mine),
        "hit_rate": sum(row["cached_tokens"] for row in mine) / sum(row["prompt_tokens"] for row in mine),
        "computed_p95": float(np.quantile([row["prompt_tokens"] - row["cached_tokens"] for row in mine], 0.95)),
        "ttft_p50_ms": 1e3 * statistics.median(times),
        "ttft_p95_ms": 1e3 * times[int(0.95 * len(times))],
        "later_turns_ttft_p95_ms": 1e3 * later[int(0.95 * len(later))],
    }


def ratio(rows: list[dict[str, Any]], other: str, quantile: float, after: int = 0, seed: int = 0) -> list[float]:
    """Our quantile over theirs in turns later than `after`, with the 95 % interval of a bootstrap over requests."""
    table: dict[int, dict[str, float]] = {}
    for row in [row for row in rows if row["turn"] > after] or rows:
        table.setdefault(row["request"], {})[row["server"]] = row["ttft_s"]
    pairs = np.array([[cells["hybrid"], cells[other]] for cells in table.values()])
    rng = np.random.default_rng(seed)
    point = np.quantile(pairs, quantile, axis=0)
    drawn = [np.quantile(pairs[rng.integers(len(pairs), size=len(pairs))], quantile, axis=0) for _ in range(2000)]
    spread = np.quantile([a / b for a, b in drawn], [0.025, 0.975])
    return [float(point[0] / point[1]), *map(float, spread)]


@contextmanager
def started(workload: str, preset: str) -> Iterator[tuple[dict[str, Client], Callable[[str], ModelSpec]]]:
    """Clients of ours and both cores of stock, warm, with the sizes of `workload`; and the spec behind one of them."""
    states, tokens = SIZES[workload]
    sizes = ["--max-total-tokens", str(tokens), "--max-mamba-cache-size", str(states), "--max-running-requests",
             str(RUNNING)]  # fmt: skip
    commands: dict[str, Command] = {
        "hybrid": hybrid(*sizes),
        "stock python": stock("extra_buffer", "python"),
        "stock rust": stock("extra_buffer", "rust"),
    }
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = model.build(Path(scratch) / preset, preset)
        clients = {}
        for name, (launcher, flags, environment) in commands.items():
            log = Path(scratch) / f"{name}.log"
            server = Server(folder, [*flags, *sizes], log=log, environment=environment, launcher=launcher)
            stack.enter_context(server)
            server.wait_ready()
            clients[name] = Client(server)
            clients[name].ask(words(random.Random(0), 300), 4)
        yield clients, lambda name: from_config(folder, **engine_dtypes({**commands[name][2]}))


def measure(workload: str, preset: str, seed: int) -> dict[str, Any]:
    with started(workload, preset) as (clients, spec_of):
        return digest(workload, seed, run(workload, seed, clients), spec_of("hybrid"))


def digest(workload: str, seed: int, rows: list[dict[str, Any]], spec: ModelSpec) -> dict[str, Any]:
    """What `run` says of the servers, one beside the other, and what the simulator predicts."""
    states, tokens = SIZES[workload]
    names = list(dict.fromkeys(row["server"] for row in sorted(rows, key=lambda row: row["server"])))
    result: dict[str, Any] = {name: summary(rows, name) for name in names}
    result |= simulated(workload, seed, spec)
    for other in names[1:]:
        result[f"ttft_p50_to_{other}"] = ratio(rows, other, 0.5)
        result[f"ttft_p95_to_{other}"] = ratio(rows, other, 0.95)
        result[f"later_turns_ttft_p95_to_{other}"] = ratio(rows, other, 0.95, after=1)
    result["rows"] = [[r["request"], r["server"], r["prompt_tokens"], r["cached_tokens"], round(r["ttft_s"], 5)]
                      for r in rows]  # fmt: skip
    return {"states": states, "kv_tokens": tokens, "max_running": RUNNING, "seed": seed, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gdn", help=f"demo model: {', '.join(model.PRESETS)}")
    parser.add_argument("--workload", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    options = parser.parse_args()
    head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid")
    for workload in options.workload:
        result = measure(workload, options.preset, options.seed)
        print(workload, {key: value for key, value in result.items() if key != "rows"}, flush=True)
        if not options.dry:
            name = f"contention-{options.preset}-{workload}"
            print(provenance.write("serving", name, {**head, "workloads": {workload: result}}))


if __name__ == "__main__":
    main()
