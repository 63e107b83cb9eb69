"""Prefix caching serves what it should and never changes a token: real servers on the CPU platform, float32."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sglang_hybrid.engine import compat
from tests.engine.prompts import CHUNK, GRID, STRATEGIES, prompts, words
from tests.engine.support import Client, Reference, eventually

pytestmark = pytest.mark.engine

OFF = ("--disable-radix-cache",)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("preset", ["gdn", "mamba2", "kda"])
def test_tokens_equal_transformers(
    serve: Callable[..., Client], references: Callable[[str], Reference], preset: str, strategy: str
) -> None:
    client, reference = serve(preset, *STRATEGIES[strategy]), references(preset)
    client.flush()
    batch = prompts(seed=1, count=80)
    answers = client.generate_all(batch)
    assert sum(cached for _, cached in answers) > 0, "nothing was cached, so nothing was tested"
    for prompt, (output, _) in zip(batch, answers, strict=True):
        reference.assert_greedy(prompt, output, strategy)


@pytest.mark.parametrize("count", [60, pytest.param(150, marks=pytest.mark.slow)])
def test_tokens_equal_cache_off(
    serve: Callable[..., Client], references: Callable[[str], Reference], count: int
) -> None:
    """Warm and cold servers agree on the same prompts, one at a time and eight at once."""
    on, off, reference = serve("gdn", *STRATEGIES["extra_buffer"]), serve("gdn", *OFF), references("gdn")
    batch = prompts(seed=2, count=count)
    cold = off.generate_all(batch)
    assert all(cached == 0 for _, cached in cold)
    for at_once in (1, 8):
        warm = on.generate_all(batch, at_once=at_once)
        for prompt, (one, _), (other, _) in zip(batch, warm, cold, strict=True):
            reference.assert_same(prompt, one, other, f"{at_once} at once,")


@pytest.mark.slow
def test_an_identical_prompt_is_served_from_cache(
    serve: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    client, prompt = serve("gdn", *STRATEGIES["extra_buffer"]), words(random.Random(3), 700)
    first, cold = client.generate(prompt)
    second, warm = client.generate(prompt)
    assert (cold, warm) == (0, 640)  # the last multiple of the grid before the prompt's last token
    references("gdn").assert_same(prompt, first, second)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_second_turn_continues_from_the_first(serve: Callable[..., Client], strategy: str) -> None:
    client, rng = serve("gdn", *STRATEGIES[strategy]), random.Random(4)
    history, end = words(rng, 300), 0
    for _ in range(4):
        answer, cached = client.generate(history, tokens=40)
        if end == 0:
            assert cached == 0
        elif strategy == "no_buffer":
            assert cached == end - 1  # the state stands at the last token that was fed, one before the answer's end
        else:
            assert end - 2 * GRID < cached <= end
        end = len(history) + len(answer)
        history = history + answer + words(rng, 30)


@pytest.mark.slow
def test_windows_are_all_the_state_that_a_second_turn_needs(
    serve: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    """LFM2: a state has no recurrent part, so a prefill saves those of its end, of branch points and boundaries."""
    client, reference, rng = serve("conv"), references("conv"), random.Random(14)
    history, end = words(rng, 200), 1
    for _ in range(3):
        answer, cached = client.generate(history)
        assert cached == end - 1
        reference.assert_greedy(history, answer)
        end = len(history) + len(answer)
        history = history + answer + words(rng, 30)
    hits = []
    for _ in range(3):
        fork = history[:150] + words(rng, 60)
        output, cached = client.generate(fork)
        reference.assert_greedy(fork, output)
        hits.append(cached)
    assert hits == [0, 150, 150], "the first to branch saves the branch point"
    marked = words(rng, 333)
    named = {"sampling_params": {"temperature": 0, "max_new_tokens": 8, "custom_params": {"cache_boundaries": [333]}}}
    client.post("/generate", {"input_ids": marked + words(rng, 90), **named})
    output, cached = client.generate(marked + words(rng, 90))
    assert cached == 333


@pytest.mark.slow
def test_two_prompts_share_a_prefix(serve: Callable[..., Client], references: Callable[[str], Reference]) -> None:
    """Stock policy: the second prompt resumes from the last prefill chunk before the branch, the third from the branch
    itself, which was checkpointed when it was seen for the second time."""
    client, reference, rng = serve("gdn", *STRATEGIES["extra_buffer"]), references("gdn"), random.Random(5)
    shared = words(rng, 448)
    hits = []
    for _ in range(3):
        prompt = shared + words(rng, 100)
        output, cached = client.generate(prompt)
        reference.assert_greedy(prompt, output)
        hits.append(cached)
    assert hits == [0, 448 // CHUNK * CHUNK, 448]


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["static", "elastic"])
def test_data_parallel_attention(
    memory: str,
    serve: Callable[..., Client],
    models: Callable[[str], Path],
    references: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Two groups of ranks, each with a cache, in step: one passes over padding while the other computes."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    groups = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
    if compat.engine_version() == "0.5.23":
        groups = ("--tp-size", "2", "--attn-dp-size", "2")
    shared_out = ("--hybrid-memory", memory, "--hybrid-cpu-memory-gb", "0.02" if memory == "elastic" else "2")
    client, reference, rng = serve("gdn", *groups, *shared_out), references("gdn"), random.Random(21)
    batch = prompts(seed=22, count=60)
    answers = client.generate_all(batch)
    assert sum(cached for _, cached in answers) > 0
    for prompt, (output, _) in zip(batch, answers, strict=True):
        reference.assert_greedy(prompt, output)
    chats = [words(rng, 600) for _ in range(3)]
    for turn in range(3):  # each goes to the group that has it
        for number, chat in enumerate(chats):
            output, cached = client.generate(chat)
            assert cached >= (576 if turn else 0), (turn, number)
            chats[number] = chat + output + words(rng, 20)
    shared = words(rng, 448)
    for group in (0, 1):
        hits = []
        for _ in range(3):
            prompt = shared + words(rng, 100)
            output, cached = client.generate(prompt, data_parallel_rank=group)
            reference.assert_greedy(prompt, output)
            hits.append(cached)
        assert hits == [0, 0, 448], "the branch point is saved, in the group's own cache"
    other = shutil.copytree(models("gdn"), tmp_path / "other")
    weights = {name: weight.flip(0) for name, weight in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    for busy in (0, 1):
        # What needs all groups to be idle waits for them, or changes nothing: the other one would load its share of
        # the weights, or say that all is flushed.
        prompt, begun, pending = words(rng, 300), client.batches("Prefill"), ThreadPoolExecutor(1)
        told = pending.submit(client.generate, prompt, tokens=200, data_parallel_rank=busy)
        assert eventually(lambda begun=begun: client.batches("Prefill") > begun, every_s=0.01)
        assert client.answer("/flush_cache")[0] == 400
        client.post("/pause_generation", {"mode": "in_place"})
        status, text = client.answer("/update_weights_from_disk", {"model_path": str(other)})
        assert (status, "Succeeded" in text) == (400, False)
        client.post("/continue_generation", {})
        reference.assert_greedy(prompt, told.result()[0])


@pytest.mark.slow
def test_aborts_in_mid_prefill_leave_no_trace(
    serve: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    """Clients that hang up while their prompt is being computed harm neither the others nor the cache."""
    client, reference, rng = serve("gdn", *STRATEGIES["extra_buffer"]), references("gdn"), random.Random(6)
    long = [words(rng, 4000) for _ in range(6)]
    begun = client.batches("Prefill")
    connections = [client.asked(prompt) for prompt in long]
    assert eventually(lambda: client.batches("Prefill") > begun, every_s=0.01)
    for connection in connections:
        connection.close()
    batch = [prompt[: rng.randint(1, 400)] for prompt in long] + [prompt[:700] + words(rng, 40) for prompt in long]
    for prompt, (output, _) in zip(batch, client.generate_all(batch), strict=True):
        reference.assert_greedy(prompt, output)
    client.flush()
    assert client.generate(long[0][:700])[1] == 0
