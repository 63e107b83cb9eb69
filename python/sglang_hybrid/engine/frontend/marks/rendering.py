"""The prompt of a chat request as text, by SGLang's own rendering: what marks on content are placed in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rendered:
    """A prompt as text, with the options it is encoded with, or as tokens where SGLang has no text of it."""

    prompt: str | list[int]
    options: dict[str, Any] = field(default_factory=dict)


def rendered(original: Callable[..., Any], serving: Any, request: Any) -> Rendered:
    """The prompt of a chat `request`, by `original`, SGLang's `_process_messages` of `serving`."""
    view, text = copy.copy(serving), _Text(serving.tokenizer_manager.tokenizer)
    view.tokenizer_manager = _Manager(serving.tokenizer_manager, text)
    result = original(view, request.model_copy(), False)
    if text.text is not None:
        return Rendered(text.text, text.options)
    if text.encoded is not None and result.prompt_ids is text.encoded[0]:
        return Rendered(*text.encoded[1:])  # of a conversation template, which is no template of the tokenizer
    return Rendered(result.prompt_ids)


def chat_of(serving: Any, request: Any) -> Any:
    """The chat request that `serving`, SGLang's of `/v1/responses`, makes of `request` to render it."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    tools = serving._response_tools_to_chat_tools(request) or None
    return ChatCompletionRequest(
        model=request.model,
        messages=serving._construct_input_messages(request),
        tools=tools,
        tool_choice="auto" if tools and request.tool_choice != "none" else "none",
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        chat_template_kwargs=getattr(request, "chat_template_kwargs", None),  # 0.5.17 has none
    )


class _Text:
    """Stands for a tokenizer: a chat template's text is kept instead of being encoded, everything else is as it is."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text: str | None = None
        self.options: dict[str, Any] = {}
        self.encoded: tuple[list[int], str, dict[str, Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        found = self._tokenizer.apply_chat_template(*args, **kwargs)
        self.text = found if isinstance(found, str) else None
        return found

    def encode(self, text: str, **options: Any) -> list[int]:
        if text is self.text:
            self.options = options
            return []
        ids = list(self._tokenizer.encode(text, **options))
        self.encoded = (ids, text, options)
        return ids


class _Manager:
    """Stands for SGLang's tokenizer manager, with another tokenizer."""

    def __init__(self, manager: Any, tokenizer: _Text) -> None:
        self._manager, self.tokenizer = manager, tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)
