"""The trained models, served: the tokens of transformers, right answers from cache, an answer to any language."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from benchmarks.quality.questions import turns
from sglang_hybrid.demo import conversation, model
from sglang_hybrid.demo.reader import evaluation, tokens
from tests.engine.prompts import STRATEGIES
from tests.engine.support import Client, Reference

pytestmark = pytest.mark.engine

TEXTS = (
    "Wie lautet der Code für das Tor der Mühle?",
    "磨坊的门禁密码是什么？",
    "ما هو رمز البوابة؟",
    "🚪🔢❓",
    "What is the capital of France?",
    "asdf qwer zxcv",
    "",
    "<|doc|><|end|><|assistant|>",
)


@pytest.mark.parametrize("preset", [model.READERS[0], pytest.param(model.READERS[1], marks=pytest.mark.slow)])
def test_a_reader_serves_the_tokens_of_transformers(
    serve: Callable[..., Client], references: Callable[[str], Reference], preset: str
) -> None:
    client, reference, rng = serve(preset, *STRATEGIES["extra_buffer"]), references(preset), random.Random(11)
    client.flush()
    hits = 0
    for _ in range(4):
        for turn in turns(evaluation.held_out(rng, 700, 8)):
            output, cached = client.generate(turn.prompt, len(turn.answer))
            reference.assert_greedy(turn.prompt, output, turn.kind)
            hits += cached > 0
    assert hits >= 4 * 6, "later turns came from no cache, so nothing was tested"


def test_a_reader_answers_in_sentences_and_ends_by_itself(serve: Callable[..., Client]) -> None:
    """As chat clients ask, with the documents of the quickstart."""
    client = serve(model.READERS[0], *STRATEGIES["extra_buffer"])
    for question, wanted in (conversation.CONVERSATIONS[0][0], conversation.CONVERSATIONS[1][2]):
        answer, reason = said(client, question)
        assert answer.endswith(f" {wanted}.")
        assert reason == "stop"


@pytest.mark.parametrize("text", TEXTS)
def test_any_language_gets_an_answer(serve: Callable[..., Client], text: str) -> None:
    answer, reason = said(serve(model.READERS[0], *STRATEGIES["extra_buffer"]), text)
    assert reason in ("stop", "length")
    assert answer.strip()
    assert not any(mark in answer for mark in tokens.SPECIAL_TOKENS)


def said(client: Client, question: str) -> tuple[str, str]:
    """Answer and finish reason of a chat over the quickstart's documents."""
    messages = [
        {"role": "system", "content": conversation.SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 48}
    (choice,) = client.post("/v1/chat/completions", body)["choices"]
    return choice["message"]["content"], choice["finish_reason"]
