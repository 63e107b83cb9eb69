"""Servers of a prefill/decode pair are killed at every step of a request, and the router is: who is left with what.

    python -m benchmarks.serving.pd_kills [--only gdn/extra_buffer/64 ...] [--router-kills 4] [--name pd-kills]

For a GDN and a Mamba-2 model and both strategies: four requests of 40 to 3,000 tokens, two of them streams, a third of
them hung up on by their clients; a server ends itself at a named step of one of them (`tests/engine/handover`), with
all its processes, or its scheduler alone in the middle of a write. Every client gets an answer, an error or the end of
its stream; nothing may be left at the server that lives: requests, rows, tokens of KV, states, rows of metadata, rooms
and transfers, read in its scheduler. The killed server is started again, and the pair answers a prompt as one server
does. `router`: a second router before the same pair is killed under requests, and another one is started.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.pd_equality import ALONE, POOLS, Pair, pair
from sglang_hybrid.core.process import free_port
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from tests.engine.pairs import kept, watched
from tests.engine.prompts import words
from tests.engine.support import Client

POINTS = {
    "prefill": ("asked", "met", "computed", "sending", "writing", "sent-kv", "sent-state", "sent-all", "told"),
    "decode": ("asked", "met", "receiving", "received", "taken", "answering"),
}
"""Steps of a request at which a server ends, in order."""

MATRIX = ("gdn/extra_buffer/64", "gdn/no_buffer/1", "mamba2/extra_buffer/64", "mamba2/no_buffer/1")
CLIENT_S = 150.0
"""Twice the time-outs of a pair, and more: who waits longer is stuck."""


class Clients:
    """Requests at once, and what became of each."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._ask, args=(url, words(rng, rng.randint(40, 3000)), bool(at % 2), patience))
            for at in range(4)
            for patience in [rng.uniform(0.05, 3.0) if rng.random() < 1 / 3 else CLIENT_S]
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, url: str, prompt: list[int], stream: bool, patience: float) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": stream}).encode()
        request = urllib.request.Request(url + "/generate", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=patience) as answer:
                text = answer.read().decode()
            said = "answered" if not stream or text.rstrip().endswith("[DONE]") else "broken off"
            if stream and '"error"' in text:
                said = "error in the stream"
        except urllib.error.HTTPError as error:
            said = str(error.code)
            error.close()
        except TimeoutError:
            said = "stuck" if patience == CLIENT_S else "hung up"
        except (OSError, http.client.HTTPException) as error:
            hung_up = "timed out" in str(error) and patience != CLIENT_S
            said = "hung up" if hung_up else "broken off"
        self.outcomes[said] += 1

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()


def held(made: Pair, scratch: Path, since: float) -> dict[str, Any]:
    """What the servers that live have not given back, by what it is; `unknown` where one has not said since then."""
    found: Counter[str] = Counter()
    for each in made.workers():
        if not each["healthy"]:
            continue
        if each["running"] or each["waiting_tokens"]:
            found["router"] += each["running"]
        said = kept(scratch, each["url"], since)
        found.update(said or {"unknown": 1})
    return {name: count for name, count in found.items() if count}


def settled(made: Pair, scratch: Path, seconds: float = 120.0) -> dict[str, Any]:
    """What is still held after so long, nothing if all came back."""
    deadline, now = time.monotonic() + seconds, time.time()
    while (left := held(made, scratch, now)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def kill(made: Pair, scratch: Path, role: str, point: str, rng: random.Random) -> dict[str, Any]:
    """One server ends at `point` under four requests; what became of them, and what was left."""
    (scratch / f"{role}-{point}").write_text(str(rng.randint(1, 3)))
    began = time.monotonic()
    clients = Clients(made.url, rng)
    clients.wait()
    for _ in range(20):  # where hung up requests did not come to the point
        if (scratch / "killed").exists():
            break
        clients = Clients(made.url, rng)
        clients.wait()
    killed = (scratch / "killed").exists()
    took = time.monotonic() - began
    left = settled(made, scratch)
    made.wait()
    (scratch / "killed").unlink(missing_ok=True)
    return {"role": role, "point": point, "killed": killed, "outcomes": dict(clients.outcomes), "left": left,
            "seconds": round(took, 1)}  # fmt: skip


class SecondRouter:
    """`sglang-hybrid route` before the servers of a pair that has a router of its own."""

    def __init__(self, made: Pair) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "sglang_hybrid", "route", "--port", self.url.rpartition(":")[2]]
        for each in made.workers():
            command += [f"--{each['role']}", each["url"]]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "2 of 2" in line, line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def kill_router(made: Pair, scratch: Path, rng: random.Random) -> dict[str, Any]:
    router = SecondRouter(made)
    clients = Clients(router.url, rng)
    time.sleep(rng.uniform(0.02, 2.0))
    router.kill()
    began = time.monotonic()
    clients.wait()
    took = time.monotonic() - began
    left = settled(made, scratch)
    router = SecondRouter(made)
    again = Clients(router.url, rng)
    again.wait()
    router.kill()
    return {"role": "router", "point": "-", "killed": True, "outcomes": dict(clients.outcomes), "left": left,
            "seconds": round(took, 1), "next": dict(again.outcomes)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=MATRIX, help="configurations MODEL/STRATEGY/PAGE (default: four)")
    parser.add_argument("--router-kills", type=int, default=4, help="per configuration")
    parser.add_argument("--points", nargs="*", help="ROLE/POINT (default: all)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--name", default="pd-kills", help="of the file of results (default: pd-kills)")
    parser.add_argument("flags", nargs="*", help="of the servers, behind --")
    options = parser.parse_args()
    head = provenance.head("sglang", "torch", "sglang-hybrid", "mooncake-transfer-engine-non-cuda")
    rows: list[dict[str, Any]] = []
    bad = 0
    with tempfile.TemporaryDirectory() as built:
        for name in options.only:
            preset, strategy, page = name.split("/")
            folder = model.build(Path(built) / preset, preset)
            rng = random.Random(f"{options.seed} {name}")
            probes = [words(rng, length) for length in (30, 400)]
            with Server(folder, ALONE, log=Path(built) / "alone.log") as server:
                server.wait_ready()
                expected = [Client(server).generate(prompt, 16)[0] for prompt in probes]
            scratch = Path(tempfile.mkdtemp(dir=built))
            flags = ["--mamba-radix-cache-strategy", strategy, "--page-size", page, "--chunked-prefill-size", "128"]
            with pair(folder, [*flags, *POOLS, *options.flags], watched(scratch)) as made:
                points = [(role, point) for role in POINTS for point in POINTS[role]]
                if options.points:
                    points = [tuple(each.split("/")) for each in options.points]  # type: ignore[misc]
                plan = [*points, *[("router", "-")] * options.router_kills]
                rng.shuffle(plan)
                for role, point in plan:
                    row = kill_router(made, scratch, rng) if role == "router" else kill(made, scratch, role, point, rng)
                    same = [made.generate(prompt, False, 16)[0] for prompt in probes] == expected
                    row |= {"configuration": name, "same": same, "complaints": made.complaints()}
                    wrong = not row["killed"] or row["left"] or not same or row["complaints"]
                    bad += bool(wrong or row["outcomes"].get("stuck"))
                    rows.append(row)
                    print(row, flush=True)
            # After every configuration: a run that is cut short leaves what it has.
            total = Counter(row["role"] for row in rows if row["killed"])
            said = sum((Counter(row["outcomes"]) for row in rows), Counter())
            result = {"seed": options.seed, "kills": dict(total), "outcomes": dict(said), "bad": bad, "rows": rows}
            print(provenance.write("serving", options.name, {**head, **result}), dict(total), dict(said), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
