"""What a streamed token costs the processes of a server: processor time of each, ours beside stock.

    python -m benchmarks.serving.stream_cost [--rounds 6]

Sixteen answers of 256 tokens stream at once, a chunk a token, to short prompts; the servers are all up and take turns.
`http` renders prompts and sends chunks, `detokenizer` makes text of ids, `scheduler` computes, the model included (a
toy: 4 layers, 128 wide), so that only its differences mean something. `every output` is ours as it was: the scheduler
says with every token why tokens of the prompt missed, and not with the first and the last alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks import provenance
from benchmarks.serving.servers import Command, flush, hybrid, stock, words
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server

AT_ONCE, PROMPT, TOKENS = 16, 48, 256
PROCESSES = ("http", "detokenizer", "scheduler")
PATHS = ("/generate", "/v1/chat/completions")


def commands() -> dict[str, Command]:
    launcher, flags, environment = hybrid("--enable-cache-report")
    path = os.pathsep.join(
        filter(None, (str(Path(__file__).parent / "every_output"), os.environ.get("PYTHONPATH", "")))
    )
    return {
        "stock": stock(),
        "ours": (launcher, flags, environment),
        "ours, every output": (launcher, flags, {**environment, "PYTHONPATH": path}),
    }


def spent(server: Server) -> dict[str, float]:
    """Processor seconds of the server's processes so far."""
    first = psutil.Process(server.process.pid)
    found = {"http": first}
    for process in first.children(recursive=True):
        title = " ".join(process.cmdline())
        found |= {name: process for name in PROCESSES[1:] if f"sglang::{name}" in title}
    assert len(found) == len(PROCESSES), found
    return {name: sum(process.cpu_times()[:2]) for name, process in found.items()}


def stream(url: str, path: str, rng: random.Random) -> int:
    """One answer in chunks; returns how many there were."""
    limits = {"ignore_eos": True}
    if path == "/generate":
        body: dict[str, Any] = {"input_ids": words(rng, PROMPT)}
        body["sampling_params"] = {"max_new_tokens": TOKENS, "temperature": 0, **limits}
    else:
        text = "".join(chr(97 + rng.randrange(26)) for _ in range(PROMPT))
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, **limits}
        body |= {"temperature": 0, "stream_options": {"include_usage": True}}
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return sum(line.startswith(b"data: {") for line in answer)


def round_of(server: Server, path: str, seed: int) -> dict[str, Any]:
    """Microseconds of processor time per token."""
    flush(server.url)
    before, rngs = spent(server), [random.Random(seed * AT_ONCE + at) for at in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        chunks = sum(pool.map(lambda rng: stream(server.url, path, rng), rngs))
    tokens = AT_ONCE * TOKENS
    after = spent(server)
    return {"chunks": chunks, **{name: round(1e6 * (after[name] - before[name]) / tokens, 1) for name in PROCESSES}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    head, rows = provenance.head("sglang", "torch", "transformers", "sglang-hybrid"), []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder, servers = model.build(Path(scratch) / "gdn", "gdn"), {}
        for name, (launcher, flags, environment) in commands().items():
            log = Path(scratch) / f"{len(servers)}.log"
            server = Server(folder, flags, log=log, environment=environment, launcher=launcher)
            servers[name] = stack.enter_context(server)
            server.wait_ready()
        for number in range(-1, options.rounds):  # the first warms up
            for path in PATHS:
                for name, server in servers.items():
                    row = {"server": name, "path": path, **round_of(server, path, number + 1)}
                    if number >= 0:
                        rows.append(row)
                        print(row, flush=True)
    table = []
    for path in PATHS:
        for name in servers:
            these = [row for row in rows if (row["server"], row["path"]) == (name, path)]
            medians = {process: statistics.median(row[process] for row in these) for process in PROCESSES}
            table.append({"server": name, "path": path, **medians})
            print(table[-1])
    sizes = {"at_once": AT_ONCE, "prompt_tokens": PROMPT, "tokens": TOKENS, "rounds": options.rounds}
    print(
        provenance.write("serving", "stream-cost", {**head, **sizes, "unit": "us/token", "table": table, "rows": rows})
    )


if __name__ == "__main__":
    main()
