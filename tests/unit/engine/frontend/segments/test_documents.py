"""Anthropic's documents: SGLang refuses the blocks, so they become text, whose own part is a segment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache import boundaries
from sglang_hybrid.engine.frontend import endpoints
from sglang_hybrid.engine.frontend.segments.documents import as_text
from sglang_hybrid.engine.frontend.tokenization import pages
from sglang_hybrid.engine.segments.marked import KEY
from tests.unit.engine.frontend.rendering import QWEN, Serving, ask

TEXT = "the old mill keeps its gate code, and asks: which day?"


@pytest.fixture(autouse=True)
def on(configure: Callable[..., None]) -> None:
    configure(segments="on")


def document(source: Any, **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


def body(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": list(blocks)}]}


def plain(text: Any) -> dict[str, Any]:
    return {"type": "text", "media_type": "text/plain", "data": text}


def test_a_document_is_its_title_its_context_and_its_text() -> None:
    made, leads = as_text(
        body(document(plain(TEXT), title="The mill", context="Of 1821.", citations={"enabled": True}))
    )
    (block,) = made["messages"][0]["content"]
    lead = "Title: The mill\nContext: Of 1821.\n\n"
    assert block == {"type": "text", "text": lead + TEXT}
    assert leads == {("messages", 0, "content", 0): len(lead)}
    blocks = [{"type": "text", "text": each} for each in ("one", "two")]
    made, _ = as_text(
        body(document({"type": "content", "content": blocks}), document({"type": "content", "content": "x"}))
    )
    assert [each["text"] for each in made["messages"][0]["content"]] == ["one\ntwo", "x"]


def test_its_text_is_a_segment_and_its_title_is_not() -> None:
    serving = Serving(QWEN)
    control = {"cache_control": {"type": "ephemeral"}}
    question = {"type": "text", "text": " So?"}
    asked = body(document(plain(TEXT), title="Gates", **control), question)
    params, ids = ask(serving, asked, anthropic=True)
    (start, end), used = params[KEY][0], serving.tokenizer_manager.tokenizer
    assert used.decode(ids[:start]).rpartition("\n")[0].endswith("Title: Gates\n")
    found = used.decode(ids[start:end])
    assert found in TEXT
    assert len(TEXT) - len(found) <= 8
    assert abs(params[boundaries.KEY][0] - end) <= 2, "a breakpoint stands on it as well"
    result = {"type": "tool_result", "tool_use_id": "a", "content": [document(plain(TEXT))]}
    params, ids = ask(serving, body(question, result), anthropic=True)
    assert used.decode(ids[slice(*params[KEY][0])]) == found, "the same in the result of a tool"


def test_many_documents_are_read_once_through() -> None:
    """Each costs as much as the first, or else one body would keep the process busy for hours."""
    blocks, asked = [document(plain("a"))] * 100_000, body()
    asked["messages"][0]["content"] = blocks
    made, leads = as_text(asked)
    assert len(leads) == len(made["messages"][0]["content"]) == 100_000
    assert asked["messages"][0]["content"] is blocks, "the body itself stays as it is"
    other = body({"type": "text", "text": "a"})
    assert as_text(other)[0] is other


def test_an_empty_document_is_no_segment() -> None:
    params, _ = ask(Serving(QWEN), body(document(plain("")), {"type": "text", "text": "hello"}), anthropic=True)
    assert params is None


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a file": (
        document({"type": "base64", "data": "JVBERi0="}),
        "messages.0.content.0.source.type is 'text' or 'content'",
    ),
    "a link": (document({"type": "url", "url": "http://a/b"}), "send what is no text as its text: 'url'"),
    "no source": ({"type": "document"}, "messages.0.content.0.source is an object with the type .*: None"),
    "a number": (document(plain(7)), "source.data is the document's text: 7"),
    "an image in it": (document({"type": "content", "content": [{"type": "image"}]}), "source.content is a text or"),
    "a title in a list": (document(plain("a"), title=["b"]), r"messages.0.content.0.title is a text: \['b'\]"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_text_is_refused_by_name(what: str) -> None:
    """Where SGLang reads the body, so that every endpoint says it in the words of a bad body."""
    from fastapi.exceptions import RequestValidationError

    class AnthropicMessagesRequest:
        pass

    block, says = BAD[what]
    with pytest.raises(ConfigError, match=says):
        as_text(body(block))

    async def read(**_: Any) -> None:
        pytest.fail("SGLang must not see it")

    fields = [SimpleNamespace(field_info=SimpleNamespace(annotation=AnthropicMessagesRequest))]
    with pytest.raises(RequestValidationError) as caught:
        asyncio.run(endpoints.read_body(read, body_fields=fields, received_body=body(block), embed_body_fields=False))
    (problem,) = caught.value.errors()
    assert problem["loc"] == ("body",)
    assert problem["msg"].startswith("messages.0.content.0")


def test_other_bodies_are_read_as_they_are() -> None:
    seen = []

    async def read(**given: Any) -> None:
        seen.append(given["received_body"])

    fields = [SimpleNamespace(field_info=SimpleNamespace(annotation=dict))]
    asked = body(document({"type": "base64"}))
    asyncio.run(endpoints.read_body(read, body_fields=fields, received_body=asked, embed_body_fields=False))
    assert seen == [asked]


def test_a_router_is_told_of_the_same_prompt() -> None:
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing

    state = SimpleNamespace(anthropic_serving=AnthropicServing(Serving(QWEN)))
    made = pages._anthropic(body(document(plain(TEXT), title="Gates")), state)
    assert made.messages[0].content == f"Title: Gates\n\n{TEXT}"
