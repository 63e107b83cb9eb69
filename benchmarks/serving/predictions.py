"""How many tokens of prompts are foretold to be cached, and how many were: by states, by blocks alone, by history.

    python -m benchmarks.serving.predictions [--requests 1100] [--preset gdn] [--policy forecast]

One server with pools for half of the documents that are asked for, pages of 64, its events on. Prompts about documents
and turns of chats come one after the other, each when the events of the one before are there. `restart points` is
`RestartIndex` as the router has it; `KV events` the same index without states; `text` the longest beginning that was
sent before, in whole pages, as SGLang's router keeps it. With a lag, events are applied so many requests later.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import provenance
from sglang_hybrid.core.process import free_port
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from sglang_hybrid.routing.index import NOTHING, RestartIndex, block_hashes
from tests.engine.prompts import words
from tests.engine.support import Client
from tests.engine.test_state_events import told

PAGE = 64
LAGS = (0, 1, 4, 16)
POOLS = ("--max-mamba-cache-size", "40", "--max-total-tokens", "12288", "--max-running-requests", "4")
Events = list[dict[str, Any]]


class Guess:
    """What one way of foretelling said over a run, tokens."""

    def __init__(self) -> None:
        self.right = self.promised = self.broken = self.unexpected = 0

    def note(self, said: int, served: int) -> None:
        self.right += said == served
        self.promised += said
        self.broken += max(0, said - served)
        self.unexpected += max(0, served - said)


class Late:
    """An index that hears of events `lag` requests late."""

    def __init__(self, lag: int) -> None:
        self.index, self.lag, self.waiting = RestartIndex(PAGE), lag, deque[Events]()
        self.index.join("a")

    def hear(self, events: Events) -> None:
        self.waiting.append(events)
        while len(self.waiting) > self.lag:
            for event in self.waiting.popleft():
                assert self.index.apply("a", event), event


class Sent:
    """What was sent is taken for cached."""

    def __init__(self) -> None:
        self.names: set[int] = set()

    def reach(self, names: list[int]) -> int:
        pages = 0
        while pages < len(names) and names[pages] in self.names:
            pages += 1
        return pages * PAGE


class Load:
    """Prompts: three of five ask about one of 40 documents, the others are turns of chats."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.documents = [words(self.rng, self.rng.randrange(300, 900)) for _ in range(40)]
        self.chats: list[list[int]] = [[]]

    def prompt(self) -> list[int]:
        rng = self.rng
        known = rng.choice(self.chats[-12:]) if rng.random() < 0.4 else rng.choice(self.documents)
        return [*known, *words(rng, rng.randrange(20, 120))]

    def answered(self, prompt: list[int], answer: list[int]) -> None:
        self.chats.append(prompt + answer if len(prompt) < 1200 else [])


def run(client: Client, since: Callable[[], Events], requests: int, seed: int) -> dict[str, Any]:
    """Foretell and ask; `since` gives the events that came since its last call."""
    load, sent, warm = Load(seed), Sent(), random.Random(0)
    while not since():  # a subscription takes its time
        client.generate(words(warm, 100), 2)
    client.flush()
    since()
    late = [Late(lag) for lag in LAGS]
    guesses = {"restart points": [Guess() for _ in LAGS], "KV events": [Guess() for _ in LAGS], "text": [Guess()]}
    served = asked = 0
    for at in range(requests):
        prompt = load.prompt()
        names = block_hashes(prompt[:-1], PAGE)
        reaches = [each.index.reaches_of(names).get("a", NOTHING) for each in late]
        answer, cached = client.generate(prompt, 4)
        for reach, points, blocks in zip(reaches, guesses["restart points"], guesses["KV events"], strict=True):
            points.note(reach.resume_tokens, cached)
            blocks.note(reach.kv_tokens, cached)
        guesses["text"][0].note(sent.reach(names), cached)
        sent.names.update(names)
        load.answered(prompt, answer)
        served, asked = served + cached, asked + len(prompt)
        events = since()
        for each in late:
            each.hear(events)
        if at % 100 == 99:
            print(at + 1, f"{served / asked:.3f}", {name: by[0].right for name, by in guesses.items()}, flush=True)
    rows = [
        {"by": name, "lag_requests": lag, "right": guess.right, "promised_tokens": guess.promised,
         "broken_tokens": guess.broken, "unexpected_tokens": guess.unexpected}
        for name, by in guesses.items() for lag, guess in zip(LAGS, by, strict=False)
    ]  # fmt: skip
    return {"requests": requests, "prompt_tokens": asked, "served_tokens": served, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1100)
    parser.add_argument("--preset", default="gdn")
    parser.add_argument("--policy", default="forecast")
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    head = provenance.head("sglang", "torch", "sglang-hybrid")
    with tempfile.TemporaryDirectory() as built:
        folder = model.build(Path(built) / options.preset, options.preset)
        channel = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}", "topic": "kv"})
        events = ("--hybrid-state-events", "published", "--kv-events-config", channel)
        flags = (*POOLS, *events, "--page-size", str(PAGE), "--hybrid-policy", options.policy)
        with Server(folder, flags, log=Path(built) / "log") as server:
            server.wait_ready()
            client = Client(server)
            with told(client) as since:
                found = run(client, since, options.requests, options.seed)
    print(provenance.write("serving", "predictions", {**head, **vars(options), **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
