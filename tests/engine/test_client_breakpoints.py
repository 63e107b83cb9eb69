"""Cache breakpoints as chat clients send them, against a server: what they make reusable, and what the answers say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.prompts import GRID
from tests.engine.support import Client, events
from tests.versions import since

pytestmark = pytest.mark.engine

MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
DOCUMENT = "The old mill keeps its gate code. " * 12
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FLAGS: dict[str, tuple[str, ...]] = {
    "extra_buffer": ("--enable-metrics",),
    "no_buffer": ("--mamba-radix-cache-strategy", "no_buffer", "--enable-metrics"),
}
TOOL = {"description": "opens gates " * 10, "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module", params=["extra_buffer", pytest.param("no_buffer", marks=pytest.mark.slow)])
def client(
    serve: Callable[..., Client], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Client:
    template: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    return serve("gdn", *FLAGS[request.param], "--chat-template", str(template))


def chat(client: Client, document: str, question: str, mark: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The usage of a request whose one message has a document and a question."""
    parts = [{"type": "text", "text": document, **mark}, {"type": "text", "text": question}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 4, **more}
    text = client.post("/v1/chat/completions", body)
    usage: dict[str, Any] = text["usage"] if isinstance(text, dict) else last_usage(text)
    details = usage["prompt_tokens_details"]
    assert 0 <= details["cache_write_tokens"] <= usage["prompt_tokens"] - details["cached_tokens"]
    return usage


def last_usage(stream: str) -> Any:
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))


@pytest.mark.parametrize("mark", [MARK, {"prompt_cache_breakpoint": {"mode": "explicit"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_marked_document_is_served_from_its_second_request_on(
    client: Client, mark: dict[str, Any], stream: bool
) -> None:
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    document = f"{stream} {list(mark)} {DOCUMENT}"
    first = chat(client, document, "Which gate is it? " * 8, mark, **more)
    second = chat(client, document, "And whose mill? " * 8, mark, **more)
    reached = second["prompt_tokens_details"]["cached_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] < GRID
    assert first["prompt_tokens_details"]["cache_write_tokens"] >= reached >= len(document) - GRID
    without = [chat(client, "other " + document, question, {}, **more) for question in ("a" * 99, "b" * 99)]
    assert without[1]["prompt_tokens_details"]["cached_tokens"] < GRID


@since("0.5.21", "what /v1/responses wrote to the cache")
@pytest.mark.parametrize("stream", [False, True])
def test_a_document_marked_on_the_responses_endpoint(client: Client, stream: bool) -> None:
    model = json.loads(client.get("/v1/models"))["data"][0]["id"]

    def ask(question: str) -> Any:
        parts = [{"type": "input_text", "text": f"responses {stream} {DOCUMENT}", **MARK}]
        parts += [{"type": "input_text", "text": question}]
        body = {"model": model, "input": [{"role": "user", "content": parts}], "max_output_tokens": 8, "stream": stream}
        answer = client.post("/v1/responses", body)
        if isinstance(answer, str):
            events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
            answer = next(e["response"] for e in reversed(events) if (e.get("response") or {}).get("usage"))
        return answer["usage"]["input_tokens_details"]

    first, second = ask("Which gate is it? " * 8), ask("And whose mill? " * 8)
    assert first["cached_tokens"] < GRID
    assert first["cache_write_tokens"] >= second["cached_tokens"] >= len(DOCUMENT) - GRID


def messages(client: Client, question: str, stream: bool = False, **more: Any) -> dict[str, Any]:
    """The usage that Anthropic's endpoint reports of an agent's request: tools, system, a question."""
    system = [{"type": "text", "text": "You open gates. " * 10}]
    # An answer that ends with its first token has no chunk that tells of the prompt, as far as SGLang streams it.
    body = {"model": "m", "max_tokens": 4, "temperature": 0, "system": system}
    body["messages"] = [{"role": "user", "content": question}]
    body |= {"tools": [{"name": name, **TOOL} for name in ("gate", "door")], "stream": stream, **more}
    answer = client.post("/v1/messages", body)
    if isinstance(answer, dict):
        usage: dict[str, Any] = answer["usage"]
        return usage
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    start, end = (next(e for e in events if e["type"] == kind) for kind in ("message_start", "message_delta"))
    return {**start["message"]["usage"], **end["usage"]}


def whole(usage: dict[str, Any]) -> int:
    """The prompt, as Anthropic's counts of what was read, written and neither add up."""
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(int(usage.get(kind, 0)) for kind in kinds)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_marks_its_tools_and_system(client: Client, stream: bool) -> None:
    tools = [{"name": name, **TOOL} for name in (f"gate{stream}", "door")]
    tools[1] |= MARK
    system = [{"type": "text", "text": "You open gates. " * 20, **MARK}]
    one, two = (
        messages(client, each, stream, tools=tools, system=system) for each in ("open it", "who is there, and why?")
    )
    assert one["cache_creation_input_tokens"] >= two["cache_read_input_tokens"] > 500
    assert one.get("cache_read_input_tokens", 0) < GRID
    other = messages(client, "shut it", stream, tools=tools, system="You shut gates.")
    assert other["cache_read_input_tokens"] > 300
    asked = {"model": "m", "system": system, "tools": tools, "messages": [{"role": "user", "content": "open it"}]}
    assert whole(one) == client.post("/v1/messages/count_tokens", asked)["input_tokens"]


def test_marks_that_are_none_are_refused_in_the_words_of_their_endpoint(client: Client) -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "forever"}}
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": [part]}]}
    paths = {
        "/v1/messages": "invalid_request_error",
        "/v1/chat/completions": "BadRequest",
        "/v1/responses": "BadRequest",
    }
    for path, kind in paths.items():
        if path == "/v1/responses":
            body["input"] = body.pop("messages")
        for stream in (False, True):
            status, text = client.answer(path, {**body, "stream": stream})
            said = json.loads(text)
            said = said.get("error", said)
            assert (status, said["type"]) == (400, kind)
            assert said["message"].endswith(".0.content.0.cache_control.type is 'ephemeral': 'forever'")


def test_a_mark_without_a_place_in_the_prompt_is_counted(client: Client) -> None:
    part = {"type": "text", "text": "never rendered, for the prompt is given", **MARK}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}], "input_ids": [5, 6, 7], "max_tokens": 2}
    assert client.post("/v1/chat/completions", body)["usage"]["prompt_tokens"] == 3
    lines = client.get("/metrics").splitlines()
    (counted,) = [line for line in lines if "mamba_cache_events_total{" in line and 'event="breakpoints_lost"' in line]
    assert float(counted.split()[-1]) == 1.0


def spoken(path: str, **more: Any) -> dict[str, Any]:
    """A small body for `path`."""
    message = [{"role": "user", "content": "Which gate is it, and whose?"}]
    asked = {"input": message, "max_output_tokens": 2} if path == "/v1/responses" else {"messages": message}
    return {"model": "m", "max_tokens": 2, **asked, **more}


CHATS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


def test_hints_of_all_endpoints_reach_the_cache(client: Client) -> None:
    model, before = json.loads(client.get("/v1/models"))["data"][0]["id"], events(client, "hints")
    said: dict[str, Any] = {"cache_hints": {"final": True, "back_in_s": 2.5, "lifetime_s": 60}}
    for path in CHATS:
        client.post(path, {**spoken(path, **said), "model": model})
    sampling = {"max_new_tokens": 2, "custom_params": said}
    client.post("/generate", {"input_ids": [5, 6, 7, 8], "sampling_params": sampling})
    client.post("/v1/completions", {"model": "m", "prompt": "gate", "max_tokens": 2, "custom_params": said})
    for more in ({"prompt_cache_retention": "24h"}, {"prompt_cache_retention": "in_memory", "prompt_cache_key": "k"}):
        client.post(CHATS[0], spoken(CHATS[0], **more))
    part = {"type": "text", "text": DOCUMENT, **MARK}
    client.post("/v1/messages", {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": [part]}]})
    assert events(client, "hints") == before + 7, "all but the one that asks for what is the rule"
    assert events(client, "bad_hints") == 0


BAD_HINTS: dict[str, tuple[Any, str]] = {
    "no object": (True, "cache_hints is an object: True"),
    "another word": ({"back_in": 3}, "cache_hints has final, back_in_s and lifetime_s: 'back_in'"),
    "a text": ({"back_in_s": "3"}, "cache_hints.back_in_s is a number of seconds from 0 to 1000000000: '3'"),
    "the past": ({"back_in_s": -1}, "cache_hints.back_in_s is a number of seconds from 0 to 1000000000: -1"),
    "too far": (
        {"lifetime_s": 1e10},
        "cache_hints.lifetime_s is a number of seconds from 0 to 1000000000: 10000000000.0",
    ),
    "perhaps": ({"final": 1}, "cache_hints.final is true or false: 1"),
}


@pytest.mark.parametrize("bad", BAD_HINTS)
def test_bad_hints_are_refused_by_name(client: Client, bad: str) -> None:
    value, message = BAD_HINTS[bad]
    for path in CHATS:
        status, text = client.answer(path, spoken(path, cache_hints=value))
        said = json.loads(text)
        assert status == 400
        assert message in said.get("error", said)["message"]
    sampling = {"max_new_tokens": 2, "custom_params": {"cache_hints": value}}
    status, text = client.answer("/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling})
    assert status == 400
    assert message in text.replace("\\", "")


def test_bad_retentions_and_keys_are_refused_where_clients_have_them(client: Client) -> None:
    for more, message in (
        ({"prompt_cache_retention": "7d"}, "prompt_cache_retention is 'in_memory' or 'in-memory' or '24h': '7d'"),
        ({"prompt_cache_key": "k" * 2**20}, "prompt_cache_key is a text of at most 1024 characters"),
        ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl is a time as '30m': 'soon'"),
        ({"prompt_cache_options": {"mode": "off"}}, "prompt_cache_options.mode is 'implicit' or 'explicit': 'off'"),
        ({"prompt_cache_key": 7}, "prompt_cache_key is a text of at most 1024 characters: 7"),
    ):
        status, text = client.answer(CHATS[0], spoken(CHATS[0], **more))
        assert (status, message in text) == (400, True)
        assert client.answer("/v1/messages", spoken("/v1/messages", **more))[0] == 200, "it has no such field"


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def test_a_conversation_whose_thoughts_are_left_out_later(
    serve: Callable[..., Client], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its next prompt parts from the last one in the opening of the answer, right behind the last message."""
    template: Path = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(THINKING)
    flags = ("--max-mamba-cache-size", "12", "--max-total-tokens", "16384", "--max-running-requests", "2")
    client = serve("gdn", *FLAGS["no_buffer"], *flags, "--chat-template", str(template))
    client.flush()
    messages_: list[dict[str, str]] = [{"role": "system", "content": "You open gates. " * 9}]
    before = 0
    for turn in range(4):
        messages_.append({"role": "user", "content": f"And what of gate {turn}? " * 12})
        usage = client.post("/v1/chat/completions", {"model": "m", "messages": messages_, "max_tokens": 8})["usage"]
        if turn:
            assert usage["prompt_tokens_details"]["cached_tokens"] == before, "all up to the last message"
        before = usage["prompt_tokens"] - len("\nSassistant\n<think>")  # one token for the start of a message
        messages_.append({"role": "assistant", "content": f"the gates</think>Gate {turn} is shut. " * 3})
