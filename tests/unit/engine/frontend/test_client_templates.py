"""What requests say to a chat template: a template of their own is refused, its arguments reach every rendering."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.frontend import endpoints
from sglang_hybrid.engine.frontend.marks.rendering import chat_of
from sglang_hybrid.engine.frontend.tokenization import pages
from tests.versions import since

OWN = {"chat_template_kwargs": {"chat_template": "{% for a in range(99999) %}{% for b in range(99999) %}"}}


def read(body: Any) -> Any:
    async def original(**given: Any) -> Any:
        return given["received_body"]

    return asyncio.run(endpoints.read_body(original, received_body=body))


def test_a_clients_own_template_is_refused_unless_the_server_trusts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every endpoint and before anything renders it, long chats too: it may run for ever."""
    monkeypatch.setattr(compat, "trusts_templates", lambda: False)
    with pytest.raises(RequestValidationError, match=r"drop chat_template_kwargs\.chat_template: '{% for a"):
        read(OWN)
    for body in ({"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": None}, [OWN], None):
        assert read(body) == body
    monkeypatch.setattr(compat, "trusts_templates", lambda: True)
    assert read(OWN) == OWN


def test_routers_hand_on_no_template_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "trusts_templates", lambda: False)

    async def body() -> bytes:
        return json.dumps(OWN).encode()

    asked = {"endpoint": "/v1/chat/completions", "body": OWN, "page_tokens": 64}
    request = SimpleNamespace(model_extra={pages.KEY: asked}, messages=None)
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.chat_template"):
        asyncio.run(pages.tokenize(None, None, None, request, SimpleNamespace(body=body)))  # type: ignore[arg-type]


@since("0.5.21", "chat_template_kwargs at /v1/responses")
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_response_is_rendered_ahead_with_all_that_the_template_reads(choice: str) -> None:
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

    serving = SimpleNamespace(
        _construct_input_messages=lambda request: [{"role": "user", "content": request.input}],
        _response_tools_to_chat_tools=lambda _: [{"type": "function", "function": {"name": "look"}}],
    )
    more = {"tool_choice": choice, "reasoning": {"effort": "low"}}
    request = ResponsesRequest(model="m", input="a", chat_template_kwargs={"enable_thinking": False}, **more)
    made = chat_of(serving, request)
    assert (made.chat_template_kwargs["enable_thinking"], made.reasoning_effort) == (False, "low")
    assert (made.tools[0].function.name, made.tool_choice) == ("look", choice)
