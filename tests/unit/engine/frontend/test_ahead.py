"""A long chat is tokenised beside the event loop, and known when SGLang tokenises it."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.frontend.tokenization import ahead, texts


class Chat(SimpleNamespace):
    def model_copy(self) -> Any:
        return self


class Serving:
    """Renders a chat as SGLang's does."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer)

    def _process_messages(self, request: Any, is_multimodal: bool) -> Any:
        tokenizer = self.tokenizer_manager.tokenizer
        text = tokenizer.apply_chat_template(request.messages)
        return SimpleNamespace(prompt_ids=tokenizer.encode(text, add_special_tokens=False))


class Tokenizer:
    def apply_chat_template(self, messages: Any) -> str:
        return "".join(messages)

    def encode(self, text: str, **options: Any) -> list[int]:
        raise AssertionError("not by the tokenizer itself")


class Request:
    """Of a client; its body was read before."""

    def __init__(self, messages: Any) -> None:
        self._sent = json.dumps(messages).encode()

    async def body(self) -> bytes:
        return self._sent


def chat(body: Any) -> Any:
    return Chat(messages=body)


def test_a_long_chat_is_tokenised_in_a_thread_as_sglang_will(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[Any, ...]] = []
    goes_on = threading.Event()

    def known(tokenizer: Any, text: str, options: dict[str, Any]) -> list[int]:
        assert goes_on.wait(60), "the event loop waits"
        found.append((tokenizer, text, options))
        return []

    monkeypatch.setattr(texts, "known", known)
    serving, messages = Serving(Tokenizer()), ["a" * texts.LONG, "b"]

    async def run() -> None:
        work = asyncio.create_task(ahead.tokenize(serving, Request(messages), chat))
        await asyncio.sleep(0)
        goes_on.set()
        await work

    asyncio.run(run())
    assert found == [(serving.tokenizer_manager.tokenizer, "".join(messages), {"add_special_tokens": False})]


def test_a_short_chat_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "known", None)
    for given in (Request(["a"]), None):
        asyncio.run(ahead.tokenize(Serving(None), given, chat))


@pytest.mark.parametrize("messages", [[1] * texts.LONG, {"a": "b" * texts.LONG}])
def test_what_is_wrong_with_a_chat_is_told_by_sglang(messages: Any) -> None:
    asyncio.run(ahead.tokenize(Serving(Tokenizer()), Request(messages), chat))


def test_a_long_chat_whose_text_cannot_be_cut_is_tokenised_once() -> None:
    class Whole(Tokenizer):
        asked = 0

        def encode(self, text: str, **options: Any) -> list[int]:
            if (found := texts.known(self, text, options)) is not None:
                return found
            self.asked += 1
            return [len(text), threading.get_ident()]

    tokenizer = Whole()
    serving = Serving(tokenizer)

    async def run() -> list[list[int]]:
        await ahead.tokenize(serving, Request(["a" * texts.LONG]), chat)
        return [serving._process_messages(chat(["a" * size]), False).prompt_ids for size in (3, texts.LONG, texts.LONG)]

    (_, elsewhere), (size, thread), (_, here) = asyncio.run(run())
    assert (size, tokenizer.asked) == (texts.LONG, 3)
    assert thread != here == elsewhere
