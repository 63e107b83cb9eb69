"""Conversations that outlive their server: what storage behind the host tier gives back, ours beside stock SGLang.

    python -m benchmarks.serving.storage [--conversations 20] [--tokens 1900] [--seed 1]

One server gets the first prompt of every conversation, and ends; another of the same kind starts on its folder of files
and gets every second prompt, the first and 64 tokens more, one request at a time. The device and the host tier hold
everything, so a file that is missing was not written. The floor is a server without storage, the ceiling one that did
not end; the bound of the hit rate is a first prompt's whole pages. Files are read from the page cache of this machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.host_tier import ANSWER, second_turns
from benchmarks.serving.servers import ENVIRONMENT, STOCK, Client, Command, words
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import LAUNCHER, Server
from sglang_hybrid.engine.hicache.copies import IO_BACKEND, LAYOUT

CHUNK, PAGE, MORE = 2048, 64, 64
RUNNING = 2
SETTLED_S, SETTLES_WITHIN_S = 2.0, 60.0
"""Files are written behind an answer: so long without a new one, and all are there."""


def flags(conversations: int, tokens: int, policy: str | None) -> list[str]:
    """Pools for every conversation on the device, and twice that in the host tier; `policy`: when prefetches end."""
    kv = conversations * (tokens + MORE + 2 * PAGE)
    tier = ["--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-io-backend", IO_BACKEND]
    tier += ["--hicache-mem-layout", LAYOUT, "--page-size", str(PAGE), "--hicache-write-policy", "write_through"]
    if policy:
        tier += ["--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", policy]
    sizes = ["--max-total-tokens", str(kv), "--max-mamba-cache-size", str(4 * conversations + 8)]
    return [*tier, *sizes, "--chunked-prefill-size", str(CHUNK), "--max-running-requests", str(RUNNING)]


def settle(folder: Path) -> int:
    """Wait until no further file is written; how many there are."""
    count, changed, deadline = -1, time.monotonic(), time.monotonic() + SETTLES_WITHIN_S
    while time.monotonic() < min(changed + SETTLED_S, deadline):
        now = sum(1 for _ in folder.glob("*.bin"))
        if now != count:
            count, changed = now, time.monotonic()
        time.sleep(0.1)
    return count


def first_turns(server: Server, prompts: list[list[int]]) -> None:
    client = Client(server)
    for prompt in prompts:
        client.ask(prompt, ANSWER)


def resumed(server: Server, prompts: list[list[int]]) -> dict[str, Any]:
    client = Client(server)
    client.ask(words(random.Random(99), 600), ANSWER)  # what is done once is done before
    return second_turns(client, prompts)


def measure(
    folder: Path, command: Command, first: list[list[int]], second: list[list[int]], ends: bool
) -> dict[str, Any]:
    """Both turns; `ends`: the second ones are another server's, that has the files of the first."""
    launcher, options, environment = command
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) / "kept"
        kept.mkdir()
        told = {**ENVIRONMENT, **environment, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(kept)}

        def started(name: str) -> Server:
            return Server(folder, options, log=Path(scratch) / name, environment=told, launcher=launcher)

        with started("first.log") as server:
            server.wait_ready()
            first_turns(server, first)
            files = settle(kept)
            if not ends:
                return {"files": files, **resumed(server, second)}
        with started("second.log") as server:
            server.wait_ready()
            return {"files": files, **resumed(server, second)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1900, help="of a first prompt, and up to 60 more")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    head, rng = provenance.head("sglang", "torch"), random.Random(given.seed)
    first = [words(rng, given.tokens + rng.randrange(60)) for _ in range(given.conversations)]
    second = [[*prompt, *words(rng, MORE)] for prompt in first]
    stock = [*STOCK, "--mamba-radix-cache-strategy", "extra_buffer"]

    def sized(policy: str | None) -> list[str]:
        return flags(given.conversations, given.tokens, policy)

    servers: dict[str, tuple[Command, bool]] = {
        "ours, without storage": ((LAUNCHER, sized(None), {}), True),
        **{
            f"stock, {policy}": (("sglang.launch_server", [*stock, *sized(policy)], {}), True)
            for policy in ("timeout", "wait_complete")
        },
        **{
            f"ours, {policy}": ((LAUNCHER, sized(policy), {}), True)
            for policy in ("timeout", "wait_complete", "best_effort")
        },
        "ours, the server did not end": ((LAUNCHER, sized("timeout"), {}), False),
    }
    folder = model.build(Path("models") / "demo-gdn", "gdn").resolve()
    rows = []
    for name, (command, ends) in servers.items():
        rows.append({"server": name, **measure(folder, command, first, second, ends)})
        print(rows[-1], flush=True)
    pages = sum(len(prompt) // PAGE * PAGE for prompt in first)
    shape = {**vars(given), "more_tokens": MORE, "flags": sized("timeout")}
    bound = round(pages / sum(map(len, second)), 4)
    print(provenance.write("serving", "storage", {**head, **shape, "bound_hit_rate": bound, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
