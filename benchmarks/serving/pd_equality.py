"""Prefill/decode pairs against one server, token for token; then servers of pairs killed, and who is left with what.

    python -m benchmarks.serving.pd_equality [--requests 60] [--kills 6] [--only gdn/extra_buffer/64/128 ...] [-- FLAGS]

For a GDN and a Mamba-2 model, both strategies, pages of 1 and 64 tokens (no_buffer: 1) and two chunk sizes: prompts
of lengths around every boundary, shared and continued prefixes, four at once, half of them streamed, through
`sglang-hybrid cluster --prefill 1 --decode 1`. The one server has no cache. Where two outputs differ, transformers
says whether the two tokens were a tie (closer than 2e-4 in a logit). With `--checksums` every server that decodes
compares the bytes of KV and state that arrived with those that left, and `checked` counts how often. A configuration
may name the size of tensor parallelism behind the chunk. Then the servers of the pair are killed by turns in the middle
of requests (`pd_kills` does it at every step of one): every client gets an answer or an error, and the server that
lives has no request, page or slot left. SGLang itself compares its pools whenever it is idle, and its log is searched
for complaints.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.equality import judged
from sglang_hybrid.core.process import die_with_parent, free_port
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from tests.engine.pairs import COMPLAINTS, said_by, watched
from tests.engine.prompts import prompts, words
from tests.engine.support import Client, Reference

POOLS = ("--max-mamba-cache-size", "40", "--max-running-requests", "4", "--max-total-tokens", "12032")
ALONE = ("--disable-radix-cache", "--max-running-requests", "4")
PATIENCE_S = 600.0
SHORT, LONG = 24, 6000
"""Tokens of an answer, and of the prompts under which servers are killed."""


class Pair:
    """A cluster of one server of either kind."""

    def __init__(
        self, folder: Path, scratch: Path, flags: list[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.url, self.scratch = f"http://127.0.0.1:{free_port()}", scratch
        command = [sys.executable, "-m", "sglang_hybrid", "cluster", "--prefill", "1", "--decode", "1"]
        command += ["--model-path", str(folder), "--port", self.url.rpartition(":")[2], "--logs", str(scratch), "--"]
        with (scratch / "cluster.log").open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, *flags],
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
                env={**os.environ, **(environment or {})},
            )

    def get(self, url: str) -> Any:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())

    def workers(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = self.get(self.url + "/workers")
        except OSError:
            return []
        return found

    def wait(self) -> None:
        """Until both servers are well; raises TimeoutError."""
        until(lambda: [each["healthy"] for each in self.workers()] == [True, True], "the pair is not ready")

    def generate(self, prompt: list[int], stream: bool, tokens: int = SHORT) -> tuple[list[int], int]:
        """Greedy tokens, and how many of the prompt were cached; raises OSError."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": stream}).encode()
        request = urllib.request.Request(self.url + "/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        if stream:
            text = [line[6:] for line in text.splitlines() if line.startswith("data: {")][-1]
        told = json.loads(text)
        return told["output_ids"], told["meta_info"]["cached_tokens"]

    def left(self) -> dict[str, int]:
        """What the servers that live have not given back: requests, tokens of KV, transfers."""
        found: dict[str, int] = {}
        for each in self.workers():
            if each["healthy"]:
                for load in self.get(each["url"] + "/v1/loads")["loads"]:
                    for name, value in {**load, **load["disaggregation"]}.items():
                        if (name.startswith("num_") and name.endswith(("_reqs", "used_tokens"))) or "_queue_" in name:
                            found[name] = found.get(name, 0) + int(value)
            found["router"] = found.get("router", 0) + int(each["running"])
        return {name: value for name, value in found.items() if value}

    def kill(self, role: str) -> None:
        """End the server of that kind, and all its processes, at once."""
        port = next(each["url"] for each in self.workers() if each["role"] == role).rpartition(":")[2]
        for line in subprocess.check_output(["ps", "-ww", "-eo", "pid,ppid,args"], text=True).splitlines()[1:]:
            pid, parent, arguments = line.split(None, 2)
            if int(parent) == self.process.pid and f"--port {port} " in f"{arguments} ":
                subprocess.run(["kill", "-KILL", "--", f"-{pid}"], check=True)

    def complaints(self) -> list[str]:
        """Lines of the logs of servers that are about memory, or errors that nobody expected."""
        lines = [line for log in self.scratch.glob("*-0.log") for line in log.read_text(errors="replace").splitlines()]
        return [line[:200] for line in lines if re.search(COMPLAINTS, line)]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(PATIENCE_S)


def until(holds: Any, otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.2)


@contextmanager
def pair(folder: Path, flags: list[str], environment: Mapping[str, str] | None = None) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as scratch:
        made = Pair(folder, Path(scratch), flags, environment)
        try:
            made.wait()
            yield made
        finally:
            made.stop()


def compare(made: Pair, batch: list[list[int]], cold: list[Any], reference: Reference) -> dict[str, Any]:
    with ThreadPoolExecutor(4) as pool:
        warm = list(pool.map(lambda at: made.generate(batch[at], stream=bool(at % 2)), range(len(batch))))
    counts = judged(batch, warm, cold, reference)
    until(lambda: not made.left(), f"something is left: {made.left()}")
    return {**counts, "complaints": made.complaints()}


def kills(made: Pair, count: int, rng: random.Random) -> dict[str, Any]:
    """Kill the servers by turns at random moments under four requests; each comes back, and is killed again later."""
    outcomes: dict[str, int] = {}
    leaks, slowest, complaints = 0, 0.0, set()
    for number in range(count):
        role = ("prefill", "decode")[number % 2]

        def ask(prompt: list[int]) -> None:
            try:
                made.generate(prompt, stream=False, tokens=64)
                said = "answered"
            except urllib.error.HTTPError as error:
                said = str(error.code)
                error.close()
            except OSError as error:
                said = type(error).__name__
            outcomes[said] = outcomes.get(said, 0) + 1

        longs = [words(rng, rng.randint(200, LONG)) for _ in range(4)]
        clients = [threading.Thread(target=ask, args=(prompt,)) for prompt in longs]
        for client in clients:
            client.start()
        time.sleep(rng.uniform(0.05, 2.0))
        made.kill(role)
        killed = time.monotonic()
        for client in clients:
            client.join()
        slowest = max(slowest, time.monotonic() - killed)
        try:
            until(lambda: not made.left(), "something is left")
        except TimeoutError:
            leaks += 1
        complaints.update(made.complaints())
        made.wait()
        print(f"kill {number + 1} of {count}, {role}: {outcomes}", flush=True)
    return {
        "kills": count,
        "outcomes": outcomes,
        "leaks": leaks,
        "slowest_s": round(slowest, 1),
        "complaints": sorted(complaints),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60, help="per configuration")
    parser.add_argument("--kills", type=int, default=6, help="per model, in its first configuration")
    parser.add_argument("--name", default="pd-equality", help="of the file of results (default: pd-equality)")
    parser.add_argument("--only", nargs="*", help="MODEL/STRATEGY/PAGE/CHUNK[/RANKS] (default: all twelve)")
    parser.add_argument("--checksums", action="store_true", help="compare the bytes of what is handed over")
    parser.add_argument("flags", nargs="*", help="of the servers, behind --")
    options = parser.parse_args()
    matrix = options.only or [
        f"{preset}/{strategy}/{page}/{chunk}"
        for preset in ("gdn", "mamba2")
        for chunk in (128, 512)
        for page in (64, 1)
        for strategy in ("extra_buffer", "no_buffer")
        if strategy == "extra_buffer" or page == 1  # SGLang has no_buffer with pages of one token only
    ]
    head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid", "mooncake-transfer-engine-non-cuda")
    rows: list[dict[str, Any]] = []
    cold: dict[str, Any] = {}
    seed, killed = 41, set()
    with tempfile.TemporaryDirectory() as scratch:
        for name in matrix:
            preset, strategy, page, chunk, *ranks = name.split("/")
            folder = model.build(Path(scratch) / preset, preset)
            flags = ["--mamba-radix-cache-strategy", strategy, "--page-size", page, "--chunked-prefill-size", chunk]
            flags += [*(["--tp-size", ranks[0]] if ranks else []), *options.flags]
            flags += ["--disaggregation-enable-kv-checksum"] if options.checksums else []
            told = Path(tempfile.mkdtemp(dir=scratch))
            environment = watched(told)
            if ranks:
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(int(ranks[0]))))
            batch = prompts(seed, options.requests)
            if preset not in cold:
                with Server(folder, ALONE, log=Path(scratch) / "alone.log") as server:
                    server.wait_ready()
                    cold[preset] = Client(server).generate_all(batch, SHORT, at_once=4)
            with pair(folder, [*flags, *POOLS], environment) as made:
                row = {"configuration": name, **compare(made, batch, cold[preset], Reference(folder))}
                decodes = next(each["url"] for each in made.workers() if each["role"] == "decode")
                row["checked"] = [json.loads(file.read_text())["checked"] for file in said_by(told, decodes)]
                if preset not in killed and options.kills:
                    killed.add(preset)
                    row["killed"] = kills(made, options.kills, random.Random(seed))
            rows.append(row)
            print(row, flush=True)
            total = {key: sum(each[key] for each in rows) for key in ("requests", "hits", "equal", "ties", "wrong")}
            result = {**head, "seed": seed, "flags": options.flags, "total": total, "rows": rows}
            print(provenance.write("serving", options.name, result), total, flush=True)


if __name__ == "__main__":
    main()
