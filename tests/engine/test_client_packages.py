"""The openai and anthropic packages, as their users have them, against a server: marks, hints, streams, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.prompts import GRID
from tests.engine.support import Client
from tests.versions import since

pytestmark = pytest.mark.engine

DOCUMENT = "The old mill keeps its gate code. " * 14
MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
QUESTIONS = ("Which gate is it? " * 8, "And whose mill? " * 8)


@pytest.fixture(scope="module")
def client(serve: Callable[..., Client]) -> Client:
    return serve("gdn", "--enable-metrics")


@pytest.fixture
def openai_api(client: Client) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=client.server.url + "/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture
def anthropic_api(client: Client) -> Iterator[Any]:
    import anthropic

    with anthropic.Anthropic(base_url=client.server.url, api_key="none", max_retries=0) as api:
        yield api


@pytest.mark.parametrize("stream", [False, True])
def test_chats_of_the_openai_package(openai_api: Any, stream: bool) -> None:
    import openai

    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    def ask(question: str) -> Any:
        parts = [{"type": "text", "text": f"chat {stream} {DOCUMENT}", **MARK}, {"type": "text", "text": question}]
        messages: Any = [{"role": "user", "content": parts}]
        said = {"cache_hints": {"back_in_s": 5}}
        answer: Any = openai_api.chat.completions.create(
            model="m", messages=messages, max_tokens=4, prompt_cache_key="k", extra_body=said, **more
        )
        return list(answer)[-1].usage if stream else answer.usage

    first, second = (ask(question).prompt_tokens_details for question in QUESTIONS)
    assert first.cached_tokens < GRID
    assert first.cache_write_tokens >= second.cached_tokens >= len(DOCUMENT) - GRID
    with pytest.raises(openai.BadRequestError, match=r"cache_hints\.final is true or false"):
        openai_api.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}], extra_body={"cache_hints": {"final": "yes"}}
        )


@pytest.mark.parametrize("stream", [pytest.param(False, marks=since("0.5.21", "cached tokens in responses")), True])
def test_responses_of_the_openai_package(openai_api: Any, stream: bool) -> None:
    model = openai_api.models.list().data[0].id

    def ask(question: str) -> Any:
        parts = [{"type": "input_text", "text": f"responses {stream} {DOCUMENT}", **MARK}]
        parts += [{"type": "input_text", "text": question}]
        asked: Any = [{"role": "user", "content": parts}]
        answer: Any = openai_api.responses.create(model=model, input=asked, max_output_tokens=4, stream=stream)
        if stream:
            answer = [e.response for e in answer if e.type in ("response.completed", "response.incomplete")][-1]
        return answer.usage.input_tokens_details

    first, second = (ask(question) for question in QUESTIONS)
    assert first.cached_tokens < GRID
    assert second.cached_tokens >= len(DOCUMENT) - GRID


@pytest.mark.parametrize("stream", [False, True])
def test_messages_of_the_anthropic_package(anthropic_api: Any, stream: bool) -> None:
    import anthropic

    system: Any = [{"type": "text", "text": f"messages {stream} {DOCUMENT}", **MARK}]

    def ask(question: str) -> Any:
        turn = [{"role": "user", "content": question}]
        asked: Any = {"model": "m", "max_tokens": 4, "system": system, "messages": turn}
        said = {"cache_hints": {"final": True}}
        if not stream:
            return anthropic_api.messages.create(**asked, extra_body=said).usage
        with anthropic_api.messages.stream(**asked, extra_body=said) as events:
            return events.get_final_message().usage

    first, second = (ask(question) for question in QUESTIONS)
    assert first.cache_creation_input_tokens >= second.cache_read_input_tokens >= len(DOCUMENT) - GRID
    whole = second.input_tokens + second.cache_creation_input_tokens + second.cache_read_input_tokens
    counted = anthropic_api.messages.count_tokens(
        model="m", system=system, messages=[{"role": "user", "content": QUESTIONS[1]}]
    )
    assert whole == counted.input_tokens
    bad: Any = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "7d"}}]
    with pytest.raises(anthropic.BadRequestError, match=r"cache_control\.ttl is '5m' or '1h': '7d'"):
        anthropic_api.messages.create(model="m", max_tokens=4, system=bad, messages=[{"role": "user", "content": "a"}])


def test_a_server_without_segments_takes_their_marks_for_words_of_others(
    client: Client, openai_api: Any, anthropic_api: Any
) -> None:
    """As it takes other fields that it does not know. Anthropic's documents are served as text."""
    part: Any = {"type": "text", "text": "Which gate is it?", "cache": {"any": "thing"}}
    usage = openai_api.chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}], max_tokens=2)
    assert not hasattr(usage.usage.prompt_tokens_details, "segment_tokens")
    source = {"type": "text", "media_type": "text/plain", "data": DOCUMENT}
    blocks: Any = [{"type": "document", "source": source, "title": "The mill"}, {**part, "cache": "segment"}]
    messages: Any = [{"role": "user", "content": blocks}]
    usage = anthropic_api.messages.create(model="m", messages=messages, max_tokens=2).usage
    assert len(DOCUMENT) < anthropic_api.messages.count_tokens(model="m", messages=messages).input_tokens
    assert usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens > 0
    sampling = {"max_new_tokens": 2, "custom_params": {"segments": "anything"}}
    client.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling})
    (counted,) = [line for line in client.get("/metrics").splitlines() if 'event="segments_ignored"' in line]
    assert float(counted.split()[-1]) == 1.0
    assert client.answer("/hybrid/segments", method="GET")[0] == 404
