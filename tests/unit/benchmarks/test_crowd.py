"""`crowd` asks every session's turns in order, all sessions at once, of servers with the same bytes."""

import json
import threading
from itertools import pairwise
from typing import Any

import pytest

from benchmarks import provenance
from benchmarks.serving import crowd
from sglang_hybrid.core.spec import preset


class FakeClient:
    """Answers once all sessions have asked: a crowd that is not one would wait. Knows what it served."""

    def __init__(self, sessions: int) -> None:
        self.first = threading.Barrier(sessions)
        self.asked: list[list[int]] = []

    def ask(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        earlier = [seen for seen in self.asked if prompt[: len(seen)] == seen]
        if not earlier:
            self.first.wait(timeout=60)
        self.asked.append([*prompt, *[1] * tokens])
        return {"output_ids": [1] * tokens, "cached_tokens": max(map(len, earlier), default=0), "ttft_s": 0.25}


def test_all_speak_at_once_and_each_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(crowd.SESSIONS, "chat", 3)
    client = FakeClient(3)
    found = crowd.crowd(client, "chat", 21)  # type: ignore[arg-type]
    prompts = sum(len(seen) for seen in client.asked) - 24 * len(client.asked)  # of a chat's answers, 24 tokens
    assert found["requests"] == len(client.asked) > 3
    assert found["computed_tokens"] == round(prompts * (1 - found["hit_rate"]))
    assert 0 < found["hit_rate"] < 1
    assert found["ttft_p50_s"] == found["ttft_p95_s"] == 0.25


def test_all_servers_have_the_same_bytes() -> None:
    spec = preset("marconi-7b")
    budget = 40 * spec.checkpoint_bytes
    flags = {name: flags for name, (_, flags) in crowd.servers(spec, budget).items()}
    for name, mine in flags.items():
        said = dict(pairwise(mine))
        if name.startswith("elastic"):
            held = float(said["--hybrid-cpu-memory-gb"]) * 1e9
        else:
            tokens, states = int(said["--max-total-tokens"]), int(said["--max-mamba-cache-size"])
            held = tokens * spec.kv_bytes_per_token + states * spec.checkpoint_bytes
        assert budget - spec.kv_bytes_per_token < held <= budget + 1, name


def test_the_most_at_once_is_read_from_prefills_and_decodes() -> None:
    log = "[x] Prefill batch, #new-seq: 1, #running-req: 3, #queue-req: 0\n[x] Decode batch, #running-req: 28, x: 1\n"
    assert crowd.at_once(log) == 28
    assert crowd.at_once("server_args={'x': '#running-req: 99'}") == 0


@pytest.mark.parametrize("workload", ["agents", "fewshot"])
def test_the_committed_runs_name_every_server_and_the_ceiling(workload: str) -> None:
    kept = json.loads((provenance.place("serving") / f"crowd-{workload}.json").read_text())
    assert list(kept["servers"]) == ["stock 0.9", "here 0.9", *(f"elastic, {n}" for n in (48, 24, 16, 8))]
    assert all(0 < found["hit_rate"] <= kept["unbounded_hit_rate"] + 0.01 for found in kept["servers"].values())
    assert len({found["requests"] for found in kept["servers"].values()}) == 1
