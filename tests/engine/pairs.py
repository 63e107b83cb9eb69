"""A cluster of servers that prefill and servers that decode, for tests: how it is asked, what it holds."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.engine.launch import disaggregation
from tests.engine.support import PATIENCE_S, Reference, eventually
from tests.engine.test_cluster import Cluster

FLAGS = ("--max-mamba-cache-size", "40", "--max-total-tokens", "12032", "--max-running-requests", "4")
FLAGS += ("--chunked-prefill-size", "128")
CHECKSUMS = ("--disaggregation-enable-kv-checksum",)
COMPLAINTS = "Traceback|leak detected|does not add up|AssertionError|checksum mismatch"
HANDOVER = Path(__file__).parent / "handover"
"""A folder for PYTHONPATH: servers tell what they hold, and end where they are told to."""

SAYS_BESIDE = ("at", "checked")


def watched(scratch: Path) -> dict[str, str]:
    """The environment of servers that tell in `scratch` what they hold, and are told there where to end."""
    return {"HANDOVER": str(scratch), "PYTHONPATH": f"{HANDOVER}:{HANDOVER.parents[2]}"}


def said_by(scratch: Path, url: str) -> list[Path]:
    """What the schedulers of the server at `url` say of themselves, one file for each rank."""
    port = url.rpartition(":")[2]
    return [*scratch.glob(f"held-{port}.json"), *scratch.glob(f"held-{port}-*.json")]


def kept(scratch: Path, url: str, since: float) -> Counter[str]:
    """What the schedulers of the server at `url` have not given back; `unknown` counts those that have not said so
    since then."""
    found: Counter[str] = Counter()
    for file in said_by(scratch, url):
        said = json.loads(file.read_text())
        found["unknown"] += said["at"] < since
        found.update({name: count for name, count in said.items() if name not in SAYS_BESIDE})
    return found


def needs(engine: str) -> pytest.MarkDecorator:
    """Tests are skipped where a transfer engine is not installed."""
    found = disaggregation.missing(engine)
    return pytest.mark.skipif(found is not None, reason=f"no transfer engine: {found}")


@contextmanager
def pair(
    folder: Path, scratch: Path, *flags: str, kinds: tuple[int, int] = (1, 1), environment: Mapping[str, str] = {}
) -> Iterator[Cluster]:
    """Servers that tell what they hold; all of them are well, and have ended behind it."""
    asked = ("--prefill", str(kinds[0]), "--decode", str(kinds[1]))
    told = {**watched(scratch), **environment}
    made = Cluster(folder, scratch, *asked, flags=(*FLAGS, *flags), environment=told)
    try:
        ready = eventually(lambda: sum(each["healthy"] for each in made.workers()) == sum(kinds))
        assert ready, made.log.read_text()
        joined = eventually(lambda: all(each["events"]["snapshots"] for each in made.workers() if each["events"]))
        assert joined, "what was published before a subscription arrives is not heard"
        yield made
    finally:
        made.process.send_signal(signal.SIGINT)
        made.process.wait(PATIENCE_S)


def generate(made: Cluster, prompt: list[int], tokens: int = 8, stream: bool = False) -> tuple[list[int], int]:
    """Greedy tokens, and how many of the prompt were cached."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answer = made.ask("/generate", {"input_ids": prompt, "sampling_params": sampling, "stream": stream})
    if stream:
        events = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
        assert len(events) > 1, "not all of it at the end"
        answer = json.loads(events[-1])
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


def url_of(made: Cluster, role: str) -> str:
    return next(str(each["url"]) for each in made.workers() if each["role"] == role)


def held(made: Cluster, since: float = 0.0) -> dict[str, Any]:
    """What schedulers have not given back, and requests that the servers and the router know of.

    `unknown` counts servers whose scheduler has not said since then.
    """
    found: Counter[str] = Counter()
    for each in made.workers():
        found["router"] += each["running"] + each["waiting_tokens"]
        with urllib.request.urlopen(each["url"] + "/v1/loads", timeout=PATIENCE_S) as answer:
            for load in json.loads(answer.read())["loads"]:
                for name, value in {**load, **load["disaggregation"]}.items():
                    if name in ("num_running_reqs", "num_waiting_reqs") or name.endswith("_queue_reqs"):
                        found[name] += int(value)
        found.update(kept(made.log.parent, each["url"], since))
    return {name: count for name, count in found.items() if count}


def assert_nothing_is_left(made: Cluster) -> None:
    """No request, row, token, state, room or transfer is left anywhere, and no server complains."""
    now = time.time()
    assert eventually(lambda: not held(made, now)), held(made, now)
    assert eventually(lambda: "flushed" in str(flushed(made)))
    assert complaints(made) == []


def complaints(made: Cluster) -> list[str]:
    """Lines of the servers' logs that tell of something wrong, each once."""
    found = []
    for log in made.log.parent.glob("*-*.log"):
        text = log.read_text()
        found += [line for line in text[made.heard.get(log, 0) :].splitlines() if re.search(COMPLAINTS, line)]
        made.heard[log] = len(text)
    return found


def flushed(made: Cluster) -> str:
    try:
        return str(made.ask("/flush_cache", {}))
    except urllib.error.HTTPError as error:
        with error:
            return error.reason


def direct(url: str, body: dict[str, Any], path: str = "/generate") -> tuple[int, str]:
    """Status and text of what one server says, asked without the router."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def assert_answers(made: Cluster, reference: Reference, batch: list[list[int]], tokens: int = 8) -> int:
    """Every answer of the pair is the most likely one; how many prompts were hits."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: generate(made, prompt, tokens), batch))
    for prompt, (output, _) in zip(batch, answers, strict=True):
        reference.assert_greedy(prompt, output, "a pair:")
    return sum(hit > 0 for _, hit in answers)
