"""Chat requests with cache breakpoints and hints: a mark becomes a boundary at the token where its content ends.

The prompt is rendered once more for each mark, by SGLang's own code, with something else behind the marked content
(`breakpoints`); what both prompts begin with ends there. Requests without marks pass untouched.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache import boundaries, hints
from sglang_hybrid.engine.frontend import breakpoints
from sglang_hybrid.engine.frontend.breakpoints import Path, lifetimes, marked, shared, tokens_before, variants
from sglang_hybrid.engine.frontend.hints import CACHE_KEY, HINTS, OPTIONS, RETENTION, body_hints
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints

logger = logging.getLogger(__name__)

_NAMES = (breakpoints.CONTROL, breakpoints.BREAKPOINT, HINTS, RETENTION, CACHE_KEY, OPTIONS)
_WORDS = tuple([name.encode() for name in _NAMES])


@dataclass(frozen=True)
class _Asked:
    """A body with marks or hints, and how SGLang makes a chat request of a body; `params` are what they became."""

    body: dict[str, Any]
    paths: list[Path]
    convert: Callable[[dict[str, Any]], Any]
    hints: Hints = NO_HINTS
    params: dict[str, Any] = field(default_factory=dict)


_asked: ContextVar[_Asked | None] = ContextVar("asked", default=None)


async def openai(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any) -> Any:
    """Around `/v1/chat/completions`, whose handler others of OpenAI's endpoints share."""
    if not hasattr(request, "messages"):
        return await original(serving, request, raw_request)
    refuse = partial(serving.create_error_response, err_type="BadRequest", status_code=400)
    return await _answer(partial(original, serving, request), raw_request, type(request).model_validate, refuse)


async def anthropic(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any) -> Any:
    """Around `/v1/messages`."""

    def convert(body: dict[str, Any]) -> Any:
        return serving._convert_to_chat_completion_request(type(request).model_validate(body))

    refuse = partial(serving._error_response, status_code=400, error_type="invalid_request_error")
    return await _answer(partial(original, serving, request), raw_request, convert, refuse, anthropic=True)


async def responses(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None) -> Any:
    """Around `/v1/responses`, which makes a chat request of its own in passing."""

    def convert(body: dict[str, Any]) -> Any:
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        variant = type(request).model_validate(body)
        tools = serving._response_tools_to_chat_tools(variant) or None
        messages = serving._construct_input_messages(variant)
        return ChatCompletionRequest(model=variant.model, messages=messages, tools=tools)

    refuse = partial(serving.create_error_response, err_type="BadRequest", status_code=400)
    return await _answer(partial(original, serving, request), raw_request, convert, refuse)


def sample(result: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    """After `/v1/responses` has made its sampling parameters: what its marks became goes with them."""
    asked = _asked.get()
    return result if asked is None or not asked.params else {**result, "custom_params": asked.params}


def _body(raw_request: Any) -> Any:
    """The JSON of a request that may have marks or hints, None else; it was read already, so nothing is waited for."""
    raw = getattr(raw_request, "_body", b"")
    return json.loads(raw) if any(word in raw for word in _WORDS) else None


async def _answer(
    handle: Callable[[Any], Any],
    raw_request: Any,
    convert: Callable[[dict[str, Any]], Any],
    refuse: Callable[..., Any],
    anthropic: bool = False,
) -> Any:
    """What `handle` answers to `raw_request`, whose marks `process` places meanwhile; bad words are refused."""
    body = _body(raw_request)
    try:
        paths = marked(body, anthropic)
        said = body_hints(body, lifetimes(body, paths) if paths else [], anthropic)
    except ConfigError as error:
        return refuse(message=str(error))
    token = _asked.set(_Asked(body, paths, convert, said) if paths or said != NO_HINTS else None)
    try:
        return await handle(raw_request)
    finally:
        _asked.reset(token)


def process(original: Callable[..., Any], serving: Any, request: Any, is_multimodal: bool) -> Any:
    """Around SGLang's rendering of a chat request: its marks and hints become `custom_params`."""
    asked = _asked.get()
    before = None if asked is None else request.model_copy()
    result = original(serving, request, is_multimodal)
    if asked is None or before is None:
        return result
    media = result.image_data or result.video_data or result.audio_data  # their tokens are not known yet
    placed = asked.paths and not media and request.input_ids is None
    found = _positions(asked, original, serving, before, result) if placed else []
    lost = len(asked.paths) - len(found)
    params = dict(request.custom_params or {})
    if found:
        given = params.get(boundaries.KEY, [])
        params[boundaries.KEY] = [*given, *found] if isinstance(given, list) else given
    if lost:
        logger.warning("the prompt has nothing of what %d of %d cache breakpoints stand on", lost, len(asked.paths))
        params[boundaries.LOST] = lost
    if asked.hints != NO_HINTS:
        params.setdefault(hints.KEY, hints.written(asked.hints))
    asked.params.update(params)
    request.custom_params = params
    return result


def _positions(asked: _Asked, original: Callable[..., Any], serving: Any, request: Any, result: Any) -> list[int]:
    """The position of every mark that the prompt of `result` has."""
    tokenizer = serving.tokenizer_manager.tokenizer
    ids = result.prompt_ids
    if isinstance(ids, str):  # it is encoded later
        ids = tokenizer.encode(ids)
    if len(ids) > serving.tokenizer_manager.context_len:
        return []  # it will be refused: no more work for it
    real = _rendered(original, serving, request)
    found = []
    for path in asked.paths:
        ends = []
        for body in variants(asked.body, path):
            try:
                chat = asked.convert(body)
                other = _rendered(
                    original, serving, request.model_copy(update={"messages": chat.messages, "tools": chat.tools})
                )
            except Exception as error:  # no mark is worth a request
                logger.debug("a cache breakpoint at %s cannot be placed: %s", path, error)
                continue
            if type(other.prompt) is type(real.prompt) and other.prompt != real.prompt:
                ends.append(shared(real.prompt, other.prompt))
        if not ends:
            continue
        at = min(ends)
        if isinstance(real.prompt, str):
            at = tokens_before(lambda text: tokenizer.encode(text, **real.options), ids, real.prompt, at)
        if at > 0:
            found.append(at)
    return found


class _Text:
    """Stands for a tokenizer: a chat template's text is kept instead of being encoded, everything else is as it is."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text: str | None = None
        self.options: dict[str, Any] = {}

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
        return list(self._tokenizer.encode(text, **options))


class _Manager:
    """Stands for SGLang's tokenizer manager, with another tokenizer."""

    def __init__(self, manager: Any, tokenizer: _Text) -> None:
        self._manager, self.tokenizer = manager, tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


@dataclass(frozen=True)
class _Rendered:
    """A prompt as text, with the options it is encoded with, or as tokens where SGLang has no text of it."""

    prompt: str | list[int]
    options: dict[str, Any]


def _rendered(original: Callable[..., Any], serving: Any, request: Any) -> _Rendered:
    view, text = copy.copy(serving), _Text(serving.tokenizer_manager.tokenizer)
    view.tokenizer_manager = _Manager(serving.tokenizer_manager, text)
    result = original(view, request.model_copy(), False)
    return _Rendered(result.prompt_ids if text.text is None else text.text, text.options)
