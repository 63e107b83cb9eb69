"""SGLang's sessions over our cache: the same tokens as without one, served from cache, every missed token explained."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.prompts import STRATEGIES, words
from tests.engine.support import Client, Prompt, Reference, ask, cached, eventually, misses
from tests.engine.test_hybrid_cache import deepest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SESSIONS = ("--enable-session-radix-cache", "--enable-streaming-session", "--max-total-tokens", "4000")


def opened(client: Client, **more: Any) -> str:
    """The id of a new session, which comes as a JSON string."""
    session: str = json.loads(client.post("/open_session", {"capacity_of_str_len": 10_000, **more}))
    return session


def assert_explained(answer: dict[str, Any], prompt: Prompt) -> None:
    assert answer["meta_info"]["prompt_tokens"] == len(prompt)
    assert cached(answer) + sum(misses(answer).values()) == len(prompt)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_session_equals_plain_requests(
    serve: Callable[..., Client], references: Callable[[str], Reference], strategy: str
) -> None:
    client, reference, rng = serve("gdn", *STRATEGIES[strategy]), references("gdn"), random.Random(21)
    session = opened(client)
    history: Prompt = []
    before, turns = None, []
    for number in range(4):
        new = words(rng, 150)
        prompt = history + new
        answer = ask(client, new, session_params={"id": session, "rid": before})
        reference.assert_greedy(prompt, answer["output_ids"], f"turn {number}")
        assert_explained(answer, prompt)
        assert cached(answer) >= deepest(strategy, len(history) - 7) if number else cached(answer) == 0
        before = answer["meta_info"]["id"]
        history = prompt + answer["output_ids"]
        turns.append((before, prompt, answer["output_ids"]))
    before, prompt, output = turns[1]
    new = words(rng, 40)
    other = ask(client, new, session_params={"id": session, "rid": before, "offset": 200})
    rewritten = (prompt + output)[:200] + new
    reference.assert_greedy(rewritten, other["output_ids"], "history cut at 200")
    assert_explained(other, rewritten)
    client.post("/close_session", {"session_id": session})
    assert cached(ask(client, [*history, 5])) >= deepest(strategy, len(history) - 7), (
        "a closed session leaves its cache"
    )


def test_streaming_sessions_and_the_session_radix_cache(
    serve: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    """Both keep memory by rules of SGLang's own; the tokens stay right while the pools run out."""
    client, reference, rng = serve("gdn", *SESSIONS), references("gdn"), random.Random(22)
    sessions = [opened(client, streaming=True) for _ in range(2)]
    histories: dict[str, Prompt] = {session: [] for session in [*sessions, "mine", "yours"]}
    for number in range(6):
        for session, history in histories.items():
            new = words(rng, 90)
            prompt = history + new
            if session in sessions:
                answer = ask(client, new, session_params={"id": session})
            else:
                answer = ask(client, prompt, session_id=session)
            reference.assert_greedy(prompt, answer["output_ids"], f"{session} turn {number}")
            assert_explained(answer, prompt)
            assert cached(answer) > 0 or number == 0
            histories[session] = prompt + answer["output_ids"]
        reference.assert_greedy(noise := words(rng, 700), ask(client, noise)["output_ids"], "between them")
    for session in histories:
        client.post("/close_session", {"session_id": session})
    client.flush()


def test_turns_of_a_streaming_session_are_sorted_by_weight(
    serve: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    """With `--schedule-policy dfs-weight` the first one that waits ends SGLang's scheduler: it is at no node."""
    client, rng = serve("gdn", "--enable-streaming-session", "--schedule-policy", "dfs-weight"), random.Random(29)
    session, history = opened(client, streaming=True), list[int]()
    for _ in range(3):
        new = words(rng, 90)
        answer = ask(client, new, session_params={"id": session})
        references("gdn").assert_greedy(history + new, answer["output_ids"])
        assert cached(answer) == max(0, len(history) - 1)
        history += new + answer["output_ids"]


def test_idle_streaming_sessions_leave_room_for_others(serve: Callable[..., Client]) -> None:
    """Each keeps a row of KV until it is closed; with all rows kept nobody would be admitted any more."""
    client, rng = serve("gdn", "--enable-streaming-session", "--max-running-requests", "3"), random.Random(23)
    sessions = [opened(client, streaming=True) for _ in range(2)]
    for session in sessions:
        ask(client, words(rng, 90), session_params={"id": session})
    assert client.answer("/open_session", {"capacity_of_str_len": 10_000, "streaming": True})[0] == 400
    plain = opened(client)
    for which in ({"session_params": {"id": sessions[0]}}, {"session_params": {"id": plain}}, {}):
        assert len(ask(client, words(rng, 90), **which)["output_ids"]) == 8
    client.post("/close_session", {"session_id": sessions[1]})
    again = opened(client, streaming=True)
    assert len(ask(client, words(rng, 90), session_params={"id": again})["output_ids"]) == 8


def test_streaming_sessions_do_not_starve_others(
    serve: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    """They keep most of the KV. A long prompt gets it, and so do turns that wait for each other's."""
    client = serve("gdn", "--enable-streaming-session", "--max-total-tokens", "2000", "--chunked-prefill-size", "256")
    reference, rng = references("gdn"), random.Random(24)
    histories = {opened(client, streaming=True): words(rng, 600) for _ in range(3)}
    for session, history in histories.items():
        history += ask(client, history, session_params={"id": session})["output_ids"]
    plain = words(rng, 700)
    reference.assert_greedy(plain, ask(client, plain)["output_ids"], "a plain prompt")
    for number in range(3):
        new = {session: words(rng, 100) for session in histories}
        with ThreadPoolExecutor(len(new)) as pool:
            asked = [pool.submit(ask, client, ids, session_params={"id": session}) for session, ids in new.items()]
            for answer, session in zip([each.result() for each in asked], histories, strict=True):
                prompt = histories[session] + new[session]
                reference.assert_greedy(prompt, answer["output_ids"], f"turn {number}")
                assert_explained(answer, prompt)
                histories[session] = prompt + answer["output_ids"]
    for session in histories:
        client.post("/close_session", {"session_id": session})
    client.flush()


def test_what_a_session_kept_for_itself_was_not_evicted(serve: Callable[..., Client]) -> None:
    client, rng = serve("gdn", "--enable-streaming-session"), random.Random(25)
    session = opened(client, streaming=True)
    history: Prompt = []
    for length in (600, 200):
        new = words(rng, length)
        history += new + ask(client, new, session_params={"id": session})["output_ids"]
    plain = [*history[:-8], *words(rng, 30)]
    answer = ask(client, plain)
    assert_explained(answer, plain)
    assert cached(answer) == 576
    assert set(misses(answer)) == {"below_granularity", "never_seen"}


def test_a_turn_that_was_given_up_while_it_waited_is_not_in_the_history(
    serve: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    """It has its session's memory since it was matched. A client that asks again would have asked twice."""
    client = serve("gdn", "--enable-streaming-session", "--max-total-tokens", "2000", "--chunked-prefill-size", "256")
    reference, rng = references("gdn"), random.Random(26)
    session, history, given_up = opened(client, streaming=True), words(rng, 600), words(rng, 500)
    history += ask(client, history, session_params={"id": session})["output_ids"]
    with ThreadPoolExecutor(2) as pool:
        pool.submit(ask, client, words(rng, 300), 900, rid="keeps the memory")
        assert eventually(lambda: loads(client) == (1, 0))
        waits = pool.submit(ask, client, given_up, 300, session_params={"id": session}, rid="given up")
        assert eventually(lambda: loads(client) == (1, 1))
        client.post("/abort_request", {"rid": "given up"})
        assert waits.result()["meta_info"]["finish_reason"]["type"] == "abort"
        client.post("/abort_request", {"rid": "keeps the memory"})
    new = words(rng, 100)
    answer = ask(client, new, session_params={"id": session})
    assert_explained(answer, history + new)
    reference.assert_greedy(history + new, answer["output_ids"], "the turn behind it")
    client.post("/close_session", {"session_id": session})
    client.flush()


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_turns_that_are_retracted_begin_anew(
    serve: Callable[..., Client],
    references: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
    loop: str,
) -> None:
    """SGLang takes running requests back when KV runs out; here it does so every few steps."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")
    client = serve("gdn", "--enable-streaming-session", "--max-running-requests", "4", "--hybrid-cpu-event-loop", loop)
    reference = references("gdn")

    def talk(seed: int) -> None:
        rng, session = random.Random(seed), opened(client, streaming=True)
        history: Prompt = []
        for number in range(4):
            new = words(rng, rng.randint(20, 150))
            answer = ask(client, new, 40, session_params={"id": session})
            assert_explained(answer, history + new)
            reference.assert_greedy(history + new, answer["output_ids"], f"session {seed} turn {number}")
            history += new + answer["output_ids"]
        client.post("/close_session", {"session_id": session})

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(talk, range(27, 30)))
    assert "etract" in client.server.log.read_text(errors="replace")
    client.flush()


def test_a_turn_that_waits_through_a_flush_is_computed_anew(
    serve: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    """As weights are changed: in a pause that retracts who runs, behind which others get what its session had."""
    client = serve("gdn", "--enable-streaming-session", "--max-total-tokens", "2000", "--chunked-prefill-size", "256")
    reference, rng = references("gdn"), random.Random(30)
    session, history, waits = opened(client, streaming=True), words(rng, 600), words(rng, 500)
    history += ask(client, history, session_params={"id": session})["output_ids"]
    runs, others = words(rng, 300), [words(rng, 60) for _ in range(4)]
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(ask, client, runs, 900)
        assert eventually(lambda: loads(client) == (1, 0))
        turn = pool.submit(ask, client, waits, 300, session_params={"id": session})
        assert eventually(lambda: loads(client) == (1, 1))
        client.post("/pause_generation", {"mode": "retract"})
        assert "flushed" in str(client.post("/flush_cache", {}))
        asked = [pool.submit(ask, client, each) for each in others]
        client.post("/continue_generation", {})
        for prompt, answer in zip([runs, history + waits, *others], [first, turn, *asked], strict=True):
            reference.assert_greedy(prompt, answer.result()["output_ids"])
    client.post("/close_session", {"session_id": session})
    client.flush()


def loads(client: Client) -> tuple[int, int]:
    """How many requests run and wait."""
    (load,) = json.loads(client.get("/v1/loads"))["loads"]
    return load["num_running_reqs"], load["num_waiting_reqs"]
