"""How many tokens a verification brings over reused segments, beside prompts that are computed as a whole.

    python -m benchmarks.serving.segments_drafts [--conversations 16]

The embedded reader and its head on the CPU platform; every figure is a count, not a time. Held-out conversations over
four documents are asked turn by turn, with right answers so far, then again with the documents in another order: a
prefix cache reuses nothing of those, segments all of them. Servers: stock, ours, ours with the documents marked. The
ceiling is the length of a draft and one.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.quality.segments import drawn
from benchmarks.serving.segments import SEGMENTS, Prompt
from benchmarks.serving.servers import Command, hybrid, stock
from benchmarks.serving.speculation import CHAIN, DRAFTS
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from tests.engine.support import Client

MODEL, DOCUMENTS, FACTS, SEED = "reader-gdn", 4, 5, 20_261_127
MARKED = "ours, segments"


def command(name: str) -> Command:
    """The server of an arm."""
    if name == "stock":
        launcher, given, environment = stock("extra_buffer", "python")
        return launcher, [*given, *DRAFTS["head"]], environment
    return hybrid(*DRAFTS["head"], *(SEGMENTS if name == MARKED else ()))


def turns(rng: random.Random) -> list[tuple[Prompt, list[int]]]:
    """Prompts with their right answers: a conversation's, then the same over its documents in another order."""
    encoded, ranges = drawn(rng, DOCUMENTS, FACTS)
    front, end = ranges[0][0], ranges[-1][1]
    documents = [encoded.ids[low:high] for low, high in ranges]
    found = []
    for order in (list(range(DOCUMENTS)), rng.sample(range(DOCUMENTS), DOCUMENTS)):
        ids, marks = encoded.ids[:front], []
        for each in order:
            marks.append([len(ids), len(ids) + len(documents[each])])
            ids = ids + documents[each]
        for _, start, stop in encoded.answers:
            found.append(((ids + encoded.ids[end:start], marks), encoded.ids[start:stop]))
    return found


def asked(client: Client, asks: list[tuple[Prompt, list[int]]], marked: bool) -> dict[str, Any]:
    """Ask one after the other: tokens in, from cache and from segments, out, passes, and right answers."""
    total = dict.fromkeys(("prompt_tokens", "cached_tokens", "segment_tokens", "answer_tokens", "verifications"), 0)
    right = 0
    for (prompt, segments), answer in asks:
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": len(answer), "ignore_eos": True}
        if marked:
            sampling["custom_params"] = {"segments": segments}
        found = client.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
        known = found["meta_info"]
        total["prompt_tokens"] += len(prompt)
        total["cached_tokens"] += known["cached_tokens"]
        total["segment_tokens"] += (known.get("cached_tokens_details") or {}).get("segment_tokens", 0)
        total["answer_tokens"] += len(answer) - 1  # the first comes with the prompt
        total["verifications"] += known.get("spec_verify_ct", 0)
        right += found["output_ids"] == answer
    per = round(total["answer_tokens"] / total["verifications"], 3) if total["verifications"] else None
    return {**total, "tokens_per_verification": per, "right": right, "questions": len(asks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=16)
    options = parser.parse_args()
    head = provenance.head("sglang", "torch", "sglang-hybrid")
    rng = random.Random(SEED)
    asks = [each for _ in range(options.conversations) for each in turns(rng)]
    arms = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.build(Path(scratch) / MODEL, MODEL)
        for name in ("stock", "ours", MARKED):
            launcher, given, environment = command(name)
            log = Path(scratch) / "server.log"
            with Server(folder, given, log=log, environment=environment, launcher=launcher) as server:
                server.wait_ready()
                arms[name] = asked(Client(server), asks, name == MARKED)
            print(name, arms[name], flush=True)
    ceiling = 1 + int(CHAIN[1])
    result = {**head, "model": MODEL, "seed": SEED, "documents": DOCUMENTS, "ceiling": ceiling, "arms": arms}
    print(provenance.write("serving", "segments-drafts", result))


if __name__ == "__main__":
    main()
