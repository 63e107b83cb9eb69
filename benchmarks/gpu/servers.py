"""One server at a time on the card: equality by log-probabilities, load, decoding, synchronisations; elastic memory.

    python -m benchmarks.gpu.servers --out FOLDER [--servers NAME ...] [--model FOLDER] [--kit FOLDER] [--rehearse]

Every server gets the same requests. One that fails is reported, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import provenance
from benchmarks.gpu import contention, kit, load
from benchmarks.serving.segments import SEGMENTS
from benchmarks.serving.servers import ENVIRONMENT, PLATFORM
from sglang_hybrid.demo import conversation
from sglang_hybrid.demo.server import LAUNCHER, Server

STOCK = "sglang.launch_server"
SYNC_COUNTER = Path(__file__).parent / "sync_counter"
IDLE_S = 6.0
PRESET, REHEARSED = "gdn-heads128", "gdn"
_SYNC = re.compile(r"(\S+\.py):(\d+): UserWarning: called a synchronizing CUDA operation")


@dataclass(frozen=True)
class Kind:
    """A server that is compared: launcher, flags, environment, what it is asked; `preset`: a model of its own.

    `dtype`: what it is served in and its configuration names; SGLang takes that for some of Kimi-Linear's weights.
    """

    launcher: str = LAUNCHER
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    asks: tuple[str, ...] = ("equality", "load", "decode")
    preset: str = ""
    dtype: str = ""


NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
HOST_TIER = (
    "--enable-hierarchical-cache", "--hicache-ratio", "8", "--hicache-write-policy", "write_through",
    "--max-total-tokens", "12000", "--max-mamba-cache-size", "56",
)  # fmt: skip
FLASHINFER = ("--linear-attn-prefill-backend", "flashinfer", "--linear-attn-decode-backend", "triton")
CONTENTION = (
    "--max-total-tokens", str(contention.KV_TOKENS), "--max-mamba-cache-size", str(contention.STATES),
    "--max-running-requests", str(contention.RUNNING),
)  # fmt: skip

SERVERS = {
    "stock": Kind(STOCK),
    "ours": Kind(),
    "ours, stock decisions": Kind(flags=("--hybrid-policy", "lru")),
    "ours, our kernels": Kind(environment={"SGLANG_HYBRID_KERNELS": "triton"}),
    "ours, Triton's prefill": Kind(flags=("--linear-attn-prefill-backend", "triton")),
    "ours, no buffer": Kind(flags=NO_BUFFER),
    "ours, cache off": Kind(flags=("--disable-radix-cache",), asks=("load", "decode")),
    "stock, counted": Kind(STOCK, asks=("synchronisations",)),
    "ours, counted": Kind(asks=("synchronisations",)),
    "ours, reader": Kind(asks=("reading", "equality"), preset="reader-gdn"),
    "ours, Mamba-2 reader": Kind(asks=("reading", "equality"), preset="reader-mamba2"),
    "stock, Mamba-2 reader": Kind(STOCK, asks=("reading", "equality"), preset="reader-mamba2"),
    "ours, reader drafts": Kind(
        flags=("--speculative-algorithm", "NEXTN"), asks=("reading", "equality", "decode"), preset="reader-gdn"
    ),
    "ours, n-grams": Kind(
        flags=("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"), asks=("equality", "decode")
    ),
    "ours, host tier": Kind(flags=HOST_TIER, asks=("equality",)),
    "ours, segments": Kind(flags=(*SEGMENTS,), asks=("composed", "equality"), preset="reader-gdn"),
    "ours, segments, reader drafts": Kind(
        flags=(*SEGMENTS, "--speculative-algorithm", "NEXTN"), asks=("composed", "reading"), preset="reader-gdn"
    ),
    "ours, LFM2's fused prefill": Kind(flags=NO_BUFFER, asks=("equality",), preset="conv-moe", dtype="bfloat16"),
    "ours, KDA": Kind(asks=("equality",), preset="kda", dtype="bfloat16"),
    "stock, FlashInfer's prefill": Kind(STOCK, flags=FLASHINFER),
    "ours, FlashInfer's prefill": Kind(flags=FLASHINFER),
    "stock, contention": Kind(STOCK, flags=CONTENTION, asks=("contention", "decode")),
    "ours, contention": Kind(flags=CONTENTION, asks=("contention", "decode")),
}
ELASTIC = {
    "static": Kind(asks=("load", "decode")),
    "elastic": Kind(flags=("--hybrid-memory", "elastic"), asks=("equality", "load", "decode", "growth")),
    "elastic, segments": Kind(
        flags=("--hybrid-memory", "elastic", *SEGMENTS), asks=("composed", "growth"), preset="reader-gdn"
    ),
    "elastic, reader drafts": Kind(
        flags=("--hybrid-memory", "elastic", "--speculative-algorithm", "NEXTN"),
        asks=("reading", "equality", "decode", "growth"),
        preset="reader-gdn",
    ),
}


def start(name: str, kind: Kind, options: argparse.Namespace, packages: kit.Packages) -> Server:
    """The server, not ready yet."""
    environment = {**packages.environment, **platform(options.rehearse), **kind.environment}
    if "synchronisations" in kind.asks:
        environment["PYTHONPATH"] = counted(environment)
    log = options.out / ("server-" + re.sub(r"\W+", "-", name) + ".log")
    flags = [*common(options, kind), *packages.flags, *kind.flags, *options.server_flags]
    model = build(kind.preset, options, packages) if kind.preset else options.model
    if kind.dtype and not options.rehearse:
        declare(model, kind.dtype)
    return Server(model, flags, log=log, environment=environment, launcher=kind.launcher)


def counted(environment: dict[str, str]) -> str:
    """The PYTHONPATH of `environment`, or ours, behind what counts synchronisations."""
    path = environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, (str(SYNC_COUNTER), path)))


def run(kind: Kind, begun: Callable[[], Server], options: argparse.Namespace) -> dict[str, Any]:
    """Ask the server that `begun` gives what it is to be asked, and stop it; what failed is in `error`."""
    size = load.REHEARSAL if options.rehearse else load.FULL
    found: dict[str, Any] = {}
    begin = time.perf_counter()
    try:
        with begun() as server:
            found["command"] = server.process.args
            found["start_s"] = server.wait_ready(options.start_s)
            while options.wait_for and not options.wait_for.exists():
                time.sleep(0.2)
            found["start_block"] = [line for line in server.log_tail(4000).splitlines() if "  prefill " in line][:1]
            client = load.Client(server.url)
            for asked in kind.asks:
                if options.asks and asked not in options.asks:
                    continue
                found[asked] = ASKS[asked](client, size, server.log)
    except Exception as error:  # one server must not keep the others from running
        found["error"] = f"{type(error).__name__}: {error}"[:4000]
        traceback.print_exc()
    found["seconds"] = time.perf_counter() - begin
    return found


def synchronisations(client: load.Client, size: load.Size, log: Path) -> dict[str, Any]:
    """Calls in which the host waited for the card while requests ran, by the line that made them."""
    load.equality(client, load.REHEARSAL)  # warms up
    begin = log.stat().st_size
    counted = load.conversations(client, load.REHEARSAL)
    time.sleep(1.0)
    text = log.read_bytes()[begin:].decode(errors="replace")
    calls = _SYNC.findall(text)
    places = Counter(f"{'/'.join(Path(file).parts[-2:])}:{line}" for file, line in calls).most_common(20)
    ours = sum("sglang_hybrid" in file for file, _ in calls)
    return {"requests": counted["requests"], "all": len(calls), "ours": ours, "places": places}


def growth(client: load.Client, size: load.Size, log: Path) -> dict[str, Any]:
    """Long prompts, many short ones, rest: how the bytes moved between KV and states, and what the moves cost."""
    from sglang_hybrid.engine.pools import remote

    def used() -> dict[str, float]:
        return {" ".join(filter(None, key)): value for key, value in remote.read(client.metrics()).items()}

    steps = {"begin": used()}
    long = replace(size, system=4 * size.system, turns=1)
    short = replace(size, system=size.message, conversations=4 * size.conversations, turns=1)
    for name, shape in (("long prompts", long), ("many short ones", short), ("long prompts again", long)):
        load.conversations(client, shape, seed=len(steps))
        steps[name] = used()
    client.flush()
    time.sleep(IDLE_S)
    steps["flushed and idle"] = used()
    answer = client.ask(load.branching(size, 9)[0], 8, logprobs=True)
    return {"steps": steps, "finite": all(value == value for value in answer["logprobs"])}


def reading(client: load.Client, size: load.Size, log: Path) -> dict[str, Any]:
    """The conversations of the quickstart, in the type that SGLang takes by itself: how many answers are right."""
    from openai import OpenAI

    api = OpenAI(base_url=client.url + "/v1", api_key="none", timeout=600, max_retries=0)
    rows = list(conversation.hold(api, "demo", lambda messages, answer: []))
    return {
        "answers": len(rows),
        "right": sum(row.right for row in rows),
        "later_turns_cached": all(row.cached_tokens > 0 for row in rows if row.turn > 1),
    }


def composed(client: load.Client, size: load.Size, log: Path) -> dict[str, Any]:
    """Questions over documents in two orders, unmarked and as segments: right answers, and what was reused."""
    from benchmarks.serving import segments_drafts
    from tests.engine.support import Client

    rng = random.Random(segments_drafts.SEED)
    asks = [each for _ in range(size.branching // 6) for each in segments_drafts.turns(rng)]
    found = {}
    for name in ("unmarked", "marked"):
        client.flush()
        found[name] = segments_drafts.asked(Client(SimpleNamespace(url=client.url)), asks, name == "marked")
    return found


ASKS: dict[str, Callable[[load.Client, load.Size, Path], Any]] = {
    "equality": lambda client, size, _: load.equality(client, size),
    "load": lambda client, size, _: load.conversations(client, size),
    "decode": lambda client, size, _: load.decode(client, size),
    "synchronisations": synchronisations,
    "growth": growth,
    "reading": reading,
    "composed": composed,
    "contention": lambda client, size, _: contention.ask(
        client, contention.REHEARSAL if size is load.REHEARSAL else contention.FULL
    ),
}


def platform(rehearse: bool) -> dict[str, str]:
    return ENVIRONMENT if rehearse else {}


def common(options: argparse.Namespace, kind: Kind) -> list[str]:
    """Flags of every server: pools that the load fills several times over."""
    flags = ["--enable-cache-report", "--enable-metrics", "--max-running-requests", "4" if options.rehearse else "16"]
    if options.rehearse:
        flags += PLATFORM
    elif dtype := kind.dtype or ("" if kind.preset else "bfloat16"):  # as models of that size are served
        flags += ["--dtype", dtype]
    strategy = [] if "--mamba-radix-cache-strategy" in kind.flags else ["--mamba-radix-cache-strategy", "extra_buffer"]
    if "elastic" in kind.flags:
        budget = ["--hybrid-cpu-memory-gb", "0.02"] if options.rehearse else []
        return [*flags, *strategy, *budget]
    if options.elastic and not options.rehearse:  # both share out what --mem-fraction-static leaves
        return [*flags, *strategy]
    pools = ("24", "6000") if options.rehearse else ("160", "240000")
    return [*flags, *strategy, "--max-mamba-cache-size", pools[0], "--max-total-tokens", pools[1]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.servers", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--servers", nargs="*", choices=[*SERVERS, *ELASTIC], help="all but those of elastic memory")
    parser.add_argument("--elastic", action="store_true", help="elastic beside static memory instead")
    parser.add_argument("--model", type=Path, help="folder of the model, default: one with random weights, built here")
    parser.add_argument("--kit", type=Path)
    parser.add_argument("--work", type=Path, default=Path("build/gpu"), help="where kit and model are unpacked")
    parser.add_argument("--asks", nargs="*", choices=list(ASKS), help="only these of what a server is asked")
    parser.add_argument("--at-once", action="store_true", help="start all before the first is asked; they must all fit")
    parser.add_argument("--wait-for", type=Path, help="start, but ask only once this file exists: the card is quiet")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU")
    parser.add_argument("--start-s", type=float, default=420.0, help="seconds a server may take to start")
    parser.add_argument("--limit-s", type=float, default=500.0, help="start no server after so many seconds")
    parser.add_argument("server_flags", nargs="*", help="after --: further flags of every server")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    packages = kit.unpack(options.kit, options.work) if options.kit else kit.Packages()
    options.model = options.model or build(REHEARSED if options.rehearse else PRESET, options, packages)
    kinds = ELASTIC if options.elastic else SERVERS
    names = options.servers or [name for name in kinds if asked_of_all(name, kinds[name], options)]
    result: dict[str, Any] = {**about(packages), "model": str(options.model), "servers": {}}
    every, begin = {**SERVERS, **ELASTIC}, time.perf_counter()
    starts: dict[str, Callable[[], Server]]
    starts = {name: partial(start, name, every[name], options, packages) for name in names}
    if options.at_once:
        starts = {name: begun_now(begin_one) for name, begin_one in starts.items()}
    for name in names:
        if time.perf_counter() - begin > options.limit_s:
            result["servers"][name] = {"error": f"not run: {options.limit_s:.0f} s were over"}
        else:
            result["servers"][name] = run(every[name], starts[name], options)
        part = "elastic" if options.elastic else "servers"
        (options.out / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n")
    return int(any("error" in found for found in result["servers"].values()))


def asked_of_all(name: str, kind: Kind, options: argparse.Namespace) -> bool:
    """Whether a server is one of those that run unless others are named; agents that contend want a large model."""
    return "contention" not in kind.asks and (not options.rehearse or options.elastic or name in REHEARSAL)


REHEARSAL = ("stock", "ours", "ours, no buffer", "ours, counted", "ours, reader", "ours, reader drafts")


def begun_now(begin: Callable[[], Server]) -> Callable[[], Server]:
    """Begin now; what that gives, or raises, comes when it is asked for. A server not asked for ends with us."""
    begun: Future[Server] = Future()
    try:
        begun.set_result(begin())
    except Exception as error:
        begun.set_exception(error)
    return begun.result


def about(packages: kit.Packages) -> dict[str, Any]:
    """The head of the result and the card, asked in a process that imports what the servers will."""
    script = (
        "import json, torch; from benchmarks import provenance; "
        "card = torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'; "
        "print(json.dumps({**provenance.head('sglang', 'torch', 'triton', 'transformers'), 'card': card}))"
    )
    environment = {**os.environ, **packages.environment}
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, cwd=provenance.ROOT).stdout
    return dict(json.loads(said.splitlines()[-1]))


def build(preset: str, options: argparse.Namespace, packages: kit.Packages) -> Path:
    """A model that is built here, in a process that imports what the server will."""
    folder: Path = options.work / f"demo-{preset}"
    command = [sys.executable, "-m", "sglang_hybrid.demo.model", str(folder), "--preset", preset]
    subprocess.run(command, check=True, env={**os.environ, **packages.environment})
    return folder


def declare(model: Path, dtype: str) -> None:
    """Have the configuration of `model` name `dtype`."""
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": dtype}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
