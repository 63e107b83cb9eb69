"""Requests with images stay together: they are the same up to the first one."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_hybrid.cluster.media import beginning
from sglang_hybrid.cluster.prompts import session_of

IMAGE = {"type": "image_url", "image_url": {"url": "data:,a"}}
OTHER = {"type": "image_url", "image_url": {"url": "data:,b"}}


def said(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_turns_and_questions_about_an_image_belong_together() -> None:
    first = {"messages": [said(text("Look."), IMAGE, text("What?"))]}
    same = [
        {"messages": [said(text("Look."), IMAGE, text("Who?"))]},
        {"messages": [*first["messages"], {"role": "assistant", "content": "a"}, said(OTHER)], "max_tokens": 5},
    ]
    others = [
        {"messages": [said(text("Look."), OTHER)]},
        {"messages": [said(text("See."), IMAGE)]},
        {"messages": [said(text("Hello.")), *first["messages"]]},
        {**first, "cache_salt": "tenant"},
    ]
    assert all(session_of(body) == session_of(first) for body in same)
    assert len({session_of(body) for body in [first, *others]}) == 5
    assert session_of({**first, "prompt_cache_key": "mine"}) == "None/mine"


@pytest.mark.parametrize(
    "body",
    [
        {"input": [said({"type": "input_image", "image_url": "data:,a"})]},
        {"messages": [said({"type": "image", "source": {"type": "url", "url": "data:,a"}})], "system": "s"},
        {"messages": [said({"type": "tool_result", "content": [{"type": "image", "source": {}}]})]},
        {"text": "a", "image_data": [["data:,a"], ["data:,b"]]},
        {"text": "a", "video_data": "data:,a"},
        {"messages": [said({"type": "input_audio", "input_audio": {}})]},
    ],
)
def test_images_of_every_endpoint_are_seen(body: dict[str, Any]) -> None:
    assert beginning(body) is not None


def test_no_body_goes_too_deep() -> None:
    part: Any = {"type": "image"}
    for _ in range(5_000):
        part = {"content": [part]}
    assert beginning({"messages": [said(part)]}) is None
    assert session_of({"messages": [said(part, IMAGE)]}) is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "a", "input": 5},
        {"messages": [5, {"content": 5}, said(5, text("a"), {"type": 5}), {"role": "user", "content": "a"}]},
        {"input": "words", "image_data": []},
        {"prompt": "a"},
    ],
)
def test_other_requests_have_none(body: dict[str, Any]) -> None:
    assert beginning(body) is None
    assert session_of(body) is None
