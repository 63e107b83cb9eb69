"""Reasons are true: a server that gave nothing up never says so, whatever its clients do."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.prefix.replay import replay
from tests.engine.prompts import STRATEGIES, prompts, words
from tests.engine.support import Client, Prompt, ask, cached, eventually, misses
from tests.engine.test_hybrid_cache import deepest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GIVEN_UP = {"kv_evicted", "state_evicted", "refused"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("roomy")


@pytest.fixture(scope="module")
def hot(folder: Path) -> tuple[Path, list[Prompt]]:
    """A file of hot prefixes, and what is in it."""
    rng, path = random.Random(41), folder / "hot.jsonl"
    prefixes = [words(rng, count) for count in (640, 448)]
    path.write_text("".join(json.dumps({"input_ids": prefix}) + "\n" for prefix in prefixes))
    return path, prefixes


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(serve: Callable[..., Client], strategy: str, folder: Path, hot: tuple[Path, list[Prompt]]) -> Client:
    """A server with room for everything below."""
    log = folder / f"{strategy}.jsonl"
    more = ("--hybrid-seed-prefixes", str(hot[0]), "--hybrid-request-log", str(log))
    return serve("gdn", *STRATEGIES[strategy], *more, "--max-mamba-cache-size", "1500", "--max-running-requests", "8")


def explained(prompt: Prompt, answer: dict[str, Any]) -> dict[str, int]:
    """The misses of `answer`, which add up and name nothing that did not happen."""
    found = misses(answer)
    assert sum(found.values()) == len(prompt) - cached(answer)
    assert not GIVEN_UP & set(found)
    return found


def test_hot_prefixes_hit_at_the_second_sighting(client: Client, strategy: str, hot: tuple[Path, list[Prompt]]) -> None:
    rng = random.Random(42)
    for prefix in hot[1]:
        first, second = (prefix + words(rng, 70) for _ in range(2))
        answers = [ask(client, first), ask(client, second)]
        assert [cached(answer) for answer in answers] == [0, len(prefix)]
        assert explained(first, answers[0]) == {"never_seen": len(first)}, "announced, not computed"
        assert explained(second, answers[1]) == {"never_seen": 70}


def test_a_flush_gives_up_what_was_cached(serve: Callable[..., Client], strategy: str) -> None:
    client, prompt = serve("gdn", *STRATEGIES[strategy]), words(random.Random(40), 700)
    for times in (1, 2):
        for _ in range(times):
            ask(client, prompt)
        client.flush()
        found = misses(ask(client, prompt))
        assert found["kv_evicted"] >= 640
        assert sum(found.values()) == 700
        client.flush()


def test_logprobs_of_a_prompt_have_to_be_computed(client: Client, strategy: str) -> None:
    prompt = words(random.Random(43), 700)
    ask(client, prompt)
    for start in (0, 300, 650):
        answer = ask(client, prompt, return_logprob=True, logprob_start_len=start)
        assert cached(answer) <= start
        assert explained(prompt, answer)["disabled"] == 700 - start
    assert cached(ask(client, prompt, return_logprob=True)) == deepest(strategy, 700), "those of the answer do not"


def test_what_was_aborted_in_mid_prefill_was_not_computed(client: Client) -> None:
    rng, hits = random.Random(44), []
    for number, (shared, more) in enumerate([(6000, 0), (6000, 50), (4500, 50)] * 2):
        prompt, name = words(rng, 6000), f"{client.server.url}-{number}"
        begun = client.batches("Prefill") + number
        asked = threading.Thread(target=ask, args=(client, prompt), kwargs={"rid": name})
        asked.start()
        assert eventually(lambda passes=begun: client.batches("Prefill") > passes, every_s=0.01)
        client.post("/abort_request", {"rid": name})
        asked.join()
        again = prompt[:shared] + words(rng, more)
        answer = ask(client, again)
        assert set(explained(again, answer)) <= {"never_seen", "below_granularity"}
        hits.append(cached(answer))
    assert min(hits) < 4000, "all were through before the abort, so nothing was tested"


def test_nothing_is_said_to_be_given_up_where_nothing_was(client: Client, strategy: str, folder: Path) -> None:
    """Shared and rewritten prefixes, the same answer asked for again, some at once; and all of this replays."""
    rng, batch = random.Random(45), prompts(seed=46, count=60)
    for prompt in batch:
        answer = ask(client, prompt, tokens=rng.choice((1, 8, 90)))
        explained(prompt, answer)
        if rng.random() < 0.5:
            following = prompt + answer["output_ids"] + words(rng, rng.randint(1, 200))
            explained(following, ask(client, following))
            explained(following, ask(client, following))
    crowd = prompts(seed=47, count=40)
    with ThreadPoolExecutor(len(crowd)) as pool:
        for prompt, answer in zip(crowd, pool.map(lambda prompt: ask(client, prompt), crowd), strict=True):
            explained(prompt, answer)
    again = replay(folder / f"{strategy}.jsonl")
    assert (again.evictions, again.differences) == (0, [])
