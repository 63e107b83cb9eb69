"""`extra_buffer_lazy`: the same tokens and the same hits as `extra_buffer`, with the overlap schedule that it needs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from sglang_hybrid.prefix.replay import replay
from tests.engine.prompts import CHUNK, prompts, words
from tests.engine.support import Client, Prompt, Reference

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TRACK = 64  # tokens of an answer between two states: answers here pass several
BOTH = ("--chunked-prefill-size", str(CHUNK), "--mamba-track-interval", str(TRACK))
LAZY = ("--mamba-radix-cache-strategy", "extra_buffer_lazy")


def conversations(seed: int, ask: Callable[[Prompt], tuple[Prompt, int]]) -> tuple[list[Prompt], list[int]]:
    """Ask prompts that branch, and go on from their answers, one at a time; returns the answers and their hits."""
    rng, answers, hits = random.Random(seed), [], []
    for prompt in prompts(seed, 5):
        history = prompt
        for _ in range(3):
            answer, cached = ask(history)
            answers.append(answer)
            hits.append(cached)
            history = history + answer + words(rng, rng.choice([1, 40]))
    return answers, hits


def test_tokens_are_right_and_hits_equal_extra_buffer(
    serve: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    reference, asked = references("gdn"), list[Prompt]()
    lazy = serve("gdn", *LAZY, *BOTH)

    def ask(prompt: Prompt) -> tuple[Prompt, int]:
        asked.append(prompt)
        return lazy.generate(prompt, tokens=66)

    answers, hits = conversations(21, ask)
    eager = serve("gdn", *BOTH)
    served = [eager.generate(prompt, tokens=66) for prompt in asked]
    for prompt, one, (other, _) in zip(asked, answers, served, strict=True):
        reference.assert_greedy(prompt, one)
        reference.assert_same(prompt, one, other, "extra_buffer,")
    assert hits == [hit for _, hit in served]
    answered = [hit > len(prompt) for hit, prompt in zip(hits[1::3], asked[::3], strict=True)]
    assert sum(answered) >= 3, "states of answers served the next turn"


def test_many_at_once_with_few_states(
    serve: Callable[..., Client], references: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A slot for the next state may not be there in mid-decode: then a state is not saved, and no more than that."""
    log = tmp_path_factory.mktemp("lazy") / "log.jsonl"
    small = ("--max-mamba-cache-size", "18", "--max-running-requests", "4", "--max-total-tokens", "3000")
    client, reference = serve("gdn", *LAZY, *BOTH, *small, "--hybrid-request-log", str(log)), references("gdn")
    batch = prompts(22, 30)
    answers = client.generate_all(batch, tokens=66)
    assert sum(hit for _, hit in answers) > 0
    for prompt, (output, _) in zip(batch, answers, strict=True):
        reference.assert_greedy(prompt, output, "few states,")
    probe = words(random.Random(23), 300)
    client.flush()
    assert [client.generate(probe)[1] for _ in range(2)] == [0, 256], "everything could be freed and used again"
    again = replay(log)
    assert again.evictions > 5
    assert again.differences == []
