"""What the cache does better than stock, seen from outside: real servers on the CPU platform, float32."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hybrid.prefix.replay import replay
from tests.engine.prompts import CHUNK, GRID, OVERLAP, STRATEGIES, prompts, words
from tests.engine.support import Client, Reference, ask, cached, misses

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("request-logs")


SCHEDULES = [*STRATEGIES, "overlap"]


def flags(schedule: str) -> tuple[str, ...]:
    return OVERLAP if schedule == "overlap" else STRATEGIES[schedule]


def starved(schedule: str, log: Path) -> tuple[str, ...]:
    """Pools so small that states and KV run out all the time."""
    return (
        *flags(schedule),
        *("--chunked-prefill-size", "512"),
        *("--max-mamba-cache-size", "20", "--max-running-requests", "4", "--max-total-tokens", "3000"),
        *("--context-length", "2900"),
        *("--hybrid-request-log", str(log / f"{schedule}.jsonl"), "--enable-metrics"),
    )


def deepest(strategy: str, length: int) -> int:
    """Where a prompt that was seen before can resume at best: its last token is always computed."""
    return length - 1 if strategy == "no_buffer" else (length - 1) // GRID * GRID


@pytest.mark.parametrize("length", [CHUNK + 2, 3 * CHUNK + 16, 3 * CHUNK + GRID])
def test_the_same_prompt_again_hits_whatever_its_last_chunk_leaves(serve: Callable[..., Client], length: int) -> None:
    """Its last state lies at the end of a chunk, and slots are not to spare."""
    client, rng = serve("gdn", *STRATEGIES["extra_buffer"], "--max-mamba-cache-size", "24"), random.Random(length)
    for _ in range(12):
        prompt = words(rng, length)
        first, again = client.generate(prompt), client.generate(prompt)
        assert again == (first[0], deepest("extra_buffer", length))


def test_chunks_that_begin_off_the_grid_leave_states_where_the_kernel_has_them(
    serve: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    """What was asked just now is kept by recency alone; the forecast may keep longer ones that were asked before."""
    scarce = ("--max-mamba-cache-size", "24", "--hybrid-policy", "recency")
    client = serve("mamba2", "--chunked-prefill-size", "100", *scarce)
    rng, reference = random.Random(3), references("mamba2")
    for length, hit in [(130, 64), (230, 164), (448, 364)] * 5:
        prompt = words(rng, length)
        reference.assert_greedy(prompt, client.generate(prompt)[0])
        for asked in (prompt, prompt[:-20] + words(rng, 40)):
            output, cached_tokens = client.generate(asked)
            reference.assert_greedy(asked, output)
            assert cached_tokens >= hit


@pytest.mark.parametrize("strategy", SCHEDULES)
@pytest.mark.parametrize("preset", ["gdn", "mamba2", "kda"])
def test_branch_and_tail_of_one_prefill(
    serve: Callable[..., Client], references: Callable[[str], Reference], preset: str, strategy: str
) -> None:
    client, reference, rng = serve(preset, *flags(strategy)), references(preset), random.Random(11)
    client.flush()
    shared = words(rng, 448)
    asked = [shared + words(rng, 100) for _ in range(3)]
    answers = [ask(client, prompt) for prompt in asked]
    # The second resumes where a chunk of the first ended: such states are kept while memory is to spare.
    assert [cached(answer) for answer in answers] == [0, 448 // CHUNK * CHUNK, 448], "the third resumes at the branch"
    second = answers[1]["output_ids"]
    following = asked[1] + second + words(rng, 20)
    answer = ask(client, following)
    assert cached(answer) >= 512, "the second request's own end was saved beside the branch"
    for prompt, made in zip([*asked, following], [*answers, answer], strict=True):
        reference.assert_greedy(prompt, made["output_ids"], f"{preset} {strategy}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_declared_boundary_serves_the_second_sighting(serve: Callable[..., Client], strategy: str) -> None:
    client, rng = serve("gdn", *flags(strategy)), random.Random(12)
    at = 333 if strategy == "no_buffer" else 320
    shared = words(rng, at)
    named = {"sampling": {"custom_params": {"cache_boundaries": [at]}}}
    assert cached(ask(client, shared + words(rng, 90), **named)) == 0
    assert cached(ask(client, shared + words(rng, 90))) == at


def test_pages_of_64_tokens(serve: Callable[..., Client], references: Callable[[str], Reference]) -> None:
    client, reference = serve("gdn", *flags("extra_buffer"), "--page-size", "64"), references("gdn")
    batch = prompts(seed=19, count=40)
    answers = client.generate_all(batch)
    assert sum(hit for _, hit in answers) > 0
    assert all(hit % 64 == 0 for _, hit in answers)
    for prompt, (output, _) in zip(batch, answers, strict=True):
        reference.assert_greedy(prompt, output, "page 64")


def test_a_boundary_outside_the_prompt_is_refused_for_that_request_alone(serve: Callable[..., Client]) -> None:
    client, prompt = serve("gdn", *flags("extra_buffer")), words(random.Random(13), 50)
    for bad in ([51], [0], ["10"], 7):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(client, prompt, sampling={"custom_params": {"cache_boundaries": bad}})
        assert refused.value.code == 400
        assert "cache_boundaries" in refused.value.read().decode()
    sampling = [{"max_new_tokens": 2}, {"max_new_tokens": 2, "custom_params": {"cache_boundaries": [51]}}]
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": "why"}],
        "custom_params": {"cache_boundaries": [999]},
    }
    for path, body in (
        ("/generate", {"input_ids": [prompt, prompt], "sampling_params": sampling}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "stream": True}),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            client.post(path, body)
        assert refused.value.code == 400
        assert "cache_boundaries" in refused.value.read().decode()
    assert len(ask(client, prompt)["output_ids"]) == 8


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("length", [100, 640, 700, 1024, 1100])
def test_exact_repeats_are_served(
    serve: Callable[..., Client], references: Callable[[str], Reference], strategy: str, length: int
) -> None:
    client, prompt = serve("gdn", *flags(strategy)), words(random.Random(length), length)
    first, second = ask(client, prompt), ask(client, prompt)
    assert cached(second) == deepest(strategy, length)
    references("gdn").assert_same(prompt, first["output_ids"], second["output_ids"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("key", ["extra_key", "cache_salt"])
def test_tenants_share_nothing(serve: Callable[..., Client], strategy: str, key: str) -> None:
    client, prompt = serve("gdn", *flags(strategy)), words(random.Random(key), 400)
    for tenant in ("a", "b", None):
        own = {} if tenant is None else {key: tenant}
        first, second = (ask(client, prompt, **own) for _ in range(2))
        assert cached(first) == 0
        assert misses(first) == {"never_seen": 400}, "not even the history may tell one tenant of another"
        assert cached(second) == deepest(strategy, 400)


def test_every_missed_token_has_a_reason(serve: Callable[..., Client], logs: Path) -> None:
    client, seen = serve("gdn", *starved("extra_buffer", logs)), set()
    for prompt in prompts(seed=15, count=60):
        answer = ask(client, prompt)
        assert sum(misses(answer).values()) == len(prompt) - cached(answer)
        seen |= set(misses(answer))
    assert {"never_seen", "below_granularity"} < seen
    assert seen & {"state_evicted", "kv_evicted"}


def test_reasons_in_usage_and_metrics(serve: Callable[..., Client], logs: Path) -> None:
    client = serve("gdn", *starved("extra_buffer", logs))
    chat = {"model": "m", "messages": [{"role": "user", "content": "why " * 60}], "max_tokens": 4}
    usage = client.post("/v1/chat/completions", chat)["usage"]
    details = usage["prompt_tokens_details"]
    assert details["cached_tokens"] + sum(details["miss_tokens"].values()) == usage["prompt_tokens"]
    chat |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [line.removeprefix("data: ") for line in client.post("/v1/chat/completions", chat).splitlines() if line]
    streamed = json.loads(chunks[-2])["usage"]
    assert chunks[-1] == "[DONE]"
    repeat = streamed["prompt_tokens_details"]
    assert repeat["cached_tokens"] > details["cached_tokens"]
    assert repeat["cached_tokens"] + sum(repeat["miss_tokens"].values()) == streamed["prompt_tokens"]
    text = client.get("/metrics")
    assert "sglang:mamba_cache_miss_tokens_total{" in text
    assert 'reason="never_seen"' in text


@pytest.mark.parametrize("strategy", SCHEDULES)
def test_starved_pools_change_no_token_and_kill_nothing(
    serve: Callable[..., Client], references: Callable[[str], Reference], logs: Path, strategy: str
) -> None:
    """Short and long prompts, aborts and disconnects, four at once, with room for hardly more than these four."""
    client, reference = serve("gdn", *starved(strategy, logs)), references("gdn")
    rng, batch = random.Random(16), prompts(seed=17, count=120)
    batch += [words(rng, 1500) for _ in range(6)]
    rng.shuffle(batch)
    stop = threading.Event()

    def hang_up() -> None:
        noise = random.Random(18)
        while not stop.is_set():
            try:
                client.generate(words(noise, 1200), timeout=0.2)
            except OSError:
                time.sleep(0.3)

    rude = threading.Thread(target=hang_up)
    rude.start()
    try:
        answers = client.generate_all(batch, at_once=8)
    finally:
        stop.set()
        rude.join()
    assert sum(hit for _, hit in answers) > 0
    for prompt, (output, _) in zip(batch, answers, strict=True):
        reference.assert_greedy(prompt, output, strategy)
    client.flush()  # what was hung up on ends by itself
    probe = words(rng, 700)
    assert cached(ask(client, probe)) == 0
    assert cached(ask(client, probe)) == deepest(strategy, 700), "everything could be freed and used again"
    log = logs / f"{strategy}.jsonl"
    again = replay(log)
    assert again.evictions > 50
    assert again.checkpoints > 50
    assert again.differences == []
    written = [json.loads(line) for line in log.read_text().splitlines()[:40]]
    assert written[0][1]["context_tokens"] == 2900, "what the server takes, not what the model could"
    plain = {token for prompt in batch for token in prompt}
    hashed = {token for line in written if line[0] == "arrive" for token in line[8]}
    assert len(hashed - plain) > 0.99 * len(hashed), "tokens are hashed unless plain ones are asked for"
