"""The first token of prompts whose segments are all cold: one server, and two that compute them for each other.

    python -m benchmarks.serving.segment_peers [--count 12] [--documents 8] [--tokens 1024] [--seed 1]

Every prompt has documents that nobody has seen, so all of its segments are cold. It goes to all rows in turn, one
request at a time, with one thread a server; all servers stay up, and those that are not asked sleep. Only times are
measured here, documents are random tokens.

    stock                      SGLang, the whole prompt is computed
    one server                 segments, all computed there
    two servers                segments, and `--hybrid-segment-peers`; always the same one of the two is asked
    two servers, again         the same prompt again: a ceiling, all segments are kept
    two servers, moved         its documents in another order, all kept there: the ceiling of any number of servers
    the other server, moved    the same prompt at the one that was not asked yet: it has its own share of the documents

`half_ms` is the ideal of two servers: half of what `one server` takes, by its median. `cached`, `segments` and `missed`
are tokens, `fetched` are segments that came from the other server. Equal prompts have equal answers, one token each,
whoever computed the segments: `answers` says how many had. `why_not` and `complaints` say what went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.segments import SIZES, Load, Prompt, ask, milliseconds, over
from benchmarks.serving.servers import ENVIRONMENT, STOCK
from sglang_hybrid.core.process import free_port
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import LAUNCHER, Server

WARM_UPS = 2
"""Prompts of each server before anything is measured: shares are sized by what earlier ones took."""
FIRST, OTHER = "two servers", "the other server"
AGAIN, MOVED, FETCHED = f"{FIRST}, again", f"{FIRST}, moved", f"{OTHER}, moved"
COLD = ("stock", "one server", FIRST)
ROWS = (*COLD, AGAIN, MOVED, FETCHED)
SAME = ((COLD[1], FIRST), (MOVED, FETCHED))
"""Rows that compute the same."""
COMPLAINTS = r"Traceback|\bERROR\b|too late|computes no segments|is not kept|computed here alone|not computed ahead"

Turn = dict[str, tuple[float, dict[str, Any]]]
"""By row: seconds to the first token, and what the answer says."""


def started(folder: Path, scratch: Path, stack: contextlib.ExitStack, memory_gb: float) -> dict[str, Server]:
    """All servers, ready; they end with `stack`. The two have each other's address before either starts."""
    ports = {FIRST: free_port(), OTHER: free_port()}
    peers = ["--hybrid-segment-peers", ",".join(f"http://127.0.0.1:{port}" for port in ports.values())]
    ours = ["--hybrid-segments", "on", "--hybrid-segment-memory-gb", str(memory_gb), "--hybrid-cpu-threads", "1"]
    commands = {
        "stock": ("sglang.launch_server", STOCK),
        "one server": (LAUNCHER, ours),
        FIRST: (LAUNCHER, [*ours, *peers]),
        OTHER: (LAUNCHER, [*ours, *peers]),
    }
    servers = {}
    for name, (launcher, flags) in commands.items():
        server = Server(
            folder,
            [*flags, *SIZES],
            port=ports.get(name),
            log=scratch / f"{name}.log",
            environment=ENVIRONMENT,
            launcher=launcher,
        )
        servers[name] = stack.enter_context(server)
        server.wait_ready()
    return servers


def moved(rng: random.Random, prompt: Prompt) -> Prompt:
    """The documents of `prompt` in another order, behind another lead, with another question."""

    def documents() -> Iterator[list[int]]:
        for low, high in rng.sample(prompt[1], len(prompt[1])):
            yield prompt[0][low:high]

    return over(rng, documents())


def peers(server: Server) -> list[dict[str, Any]]:
    """What a server says of the other one; nothing where there is none."""
    with urllib.request.urlopen(f"{server.url}/hybrid/segments?limit=0", timeout=60) as response:
        return [each for each in json.load(response).get("peers", []) if not each["is_self"]]


def asked(server: Server, prompt: Prompt, mark: bool = True) -> tuple[float, dict[str, Any]]:
    """`segments.ask` for one token, and how many segments came from the other server for it."""
    before = sum(each["fetched"] for each in peers(server)) if mark else 0
    seconds, said = ask(server, prompt, mark, tokens=1)
    after = sum(each["fetched"] for each in peers(server)) if mark else 0
    return seconds, {**said, "fetched": after - before}


def turn(servers: dict[str, Server], rng: random.Random, prompt: Prompt) -> Turn:
    """One prompt at every row; those where it is cold in any order."""
    cold = {name: asked(servers[name], prompt, name != "stock") for name in rng.sample(COLD, len(COLD))}
    later = moved(rng, prompt)
    return {
        **cold,
        AGAIN: asked(servers[FIRST], prompt),
        MOVED: asked(servers[FIRST], later),
        FETCHED: asked(servers[OTHER], later),
    }


def summed(name: str, turns: list[Turn]) -> dict[str, Any]:
    """One row of the result."""
    missed: Counter[str] = Counter()
    for each in turns:
        missed.update(each[name][1]["missed"])
    counts = {kind: sum(each[name][1][kind] for each in turns) for kind in ("prompt", "cached", "segments", "fetched")}
    times = milliseconds([each[name][0] for each in turns])
    return {"row": name, "prompts": len(turns), **times, **counts, "missed": dict(missed)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=12, help="prompts of a row")
    parser.add_argument("--documents", type=int, default=8, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=1024, help="of a document")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--preset", default="gdn-medium")
    parser.add_argument("--memory-gb", type=float, default=1.0, help="of segments, a server: room for all that come")
    given = parser.parse_args()
    head = provenance.head("sglang", "torch", "sglang-hybrid")
    load = Load(1, given.documents, given.tokens, given.seed)
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = model.build(Path(scratch) / given.preset, given.preset)
        servers = started(folder, Path(scratch), stack, given.memory_gb)
        for _ in range(WARM_UPS):
            turn(servers, load.rng, load.prompt(0, fresh=given.documents))
            asked(servers[OTHER], load.prompt(0, fresh=given.documents))
        for number in range(given.count):
            turns.append(turn(servers, load.rng, load.prompt(0, fresh=given.documents)))
            line = {name: round(1000 * seconds) for name, (seconds, _) in turns[-1].items()}
            print(number, json.dumps(line), file=sys.stderr, flush=True)
        why_not = {name: [each["why_not"] for each in peers(servers[name])] for name in (FIRST, OTHER)}
        logs = "\n".join(server.log.read_text(errors="replace") for server in servers.values())
    rows = [summed(name, turns) for name in ROWS]
    answers = {}
    for one, two in SAME:
        equal = sum(each[one][1]["output_ids"] == each[two][1]["output_ids"] for each in turns)
        answers[f"{two} | {one}"] = {"equal": equal, "different": len(turns) - equal}
    result = {
        **head,
        **{name: getattr(given, name) for name in ("documents", "tokens", "seed", "preset", "count", "memory_gb")},
        "warm_ups": WARM_UPS,
        "rows": rows,
        "half_ms": round(rows[ROWS.index(COLD[1])]["ttft_p50_ms"] / 2, 1),
        "half": "ttft_p50_ms of `one server`, by 2",
        "answers": answers,
        "why_not": why_not,
        "complaints": sorted({line[:200] for line in logs.splitlines() if re.search(COMPLAINTS, line)}),
    }
    print(provenance.write("serving", "segment-peers", result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
