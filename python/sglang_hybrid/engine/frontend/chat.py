"""Chat requests with cache breakpoints, segments and hints: a mark becomes a boundary at the token where its content
ends, a segment the tokens of its content.

The prompt is rendered once more for each breakpoint, by SGLang's own code, with something else behind the marked
content (`breakpoints`); what both prompts begin with ends there. For segments see `segments`. Requests without marks
pass untouched.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache import boundaries, hints
from sglang_hybrid.engine.frontend.endpoints import rendering
from sglang_hybrid.engine.frontend.marks import breakpoints, placeholders
from sglang_hybrid.engine.frontend.marks.breakpoints import Path, lifetimes, marked, shared, tokens_before, variants
from sglang_hybrid.engine.frontend.marks.hints import CACHE_KEY, HINTS, OPTIONS, RETENTION, body_hints
from sglang_hybrid.engine.frontend.marks.rendering import chat_of, rendered
from sglang_hybrid.engine.frontend.segments import chats, documents
from sglang_hybrid.engine.frontend.segments.chats import Marks, Placing
from sglang_hybrid.engine.frontend.tokenization import ahead, token_cache
from sglang_hybrid.engine.segments import marked as segment_params
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints

logger = logging.getLogger(__name__)

_NAMES = (breakpoints.CONTROL, breakpoints.BREAKPOINT, HINTS, RETENTION, CACHE_KEY, OPTIONS)
_WORDS = tuple([name.encode() for name in _NAMES])


@dataclass(frozen=True)
class _Asked:
    """A body with marks or hints, and how SGLang makes a chat request of a body; `params` are what they became.

    `paths` are breakpoints.
    """

    body: dict[str, Any]
    paths: list[Path]
    convert: Callable[[dict[str, Any]], Any]
    hints: Hints = NO_HINTS
    segments: Marks = field(default_factory=Marks)
    params: dict[str, Any] = field(default_factory=dict)


_asked: ContextVar[_Asked | None] = ContextVar("asked", default=None)


async def openai(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any) -> Any:
    """Around `/v1/chat/completions`, whose handler others of OpenAI's endpoints share."""
    token_cache.enter_of(request)
    if not hasattr(request, "messages"):
        return await original(serving, request, raw_request)
    refuse = partial(serving.create_error_response, err_type="BadRequest", status_code=400)
    convert = type(request).model_validate
    return await _answer(partial(original, serving, request), serving, raw_request, convert, refuse)


async def anthropic(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any) -> Any:
    """Around `/v1/messages`."""

    def convert(body: dict[str, Any]) -> Any:
        return serving._convert_to_chat_completion_request(type(request).model_validate(body))

    refuse = partial(serving._error_response, status_code=400, error_type="invalid_request_error")
    handle = partial(original, serving, request)
    chat = serving.openai_serving_chat
    answer, refused = await rendering(_answer(handle, chat, raw_request, convert, refuse, anthropic=True))
    return refuse(message=refused) if refused else answer


async def responses(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None) -> Any:
    """Around `/v1/responses`, which makes a chat request of its own in passing."""
    token_cache.enter_of(request)

    def convert(body: dict[str, Any]) -> Any:
        return chat_of(serving, type(request).model_validate(body))

    refuse = partial(serving.create_error_response, err_type="BadRequest", status_code=400)
    return await _answer(partial(original, serving, request), serving, raw_request, convert, refuse)


def sample(result: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    """After `/v1/responses` has made its sampling parameters: what its marks became goes with them."""
    asked = _asked.get()
    return result if asked is None or not asked.params else {**result, "custom_params": asked.params}


def _body(raw_request: Any) -> Any:
    """The JSON of a request that may have marks or hints, None else; it was read already, so nothing is waited for."""
    raw = getattr(raw_request, "_body", b"")
    return json.loads(raw) if any(word in raw for word in (*_WORDS, *chats.words())) else None


async def _answer(
    handle: Callable[[Any], Any],
    serving: Any,
    raw_request: Any,
    convert: Callable[[dict[str, Any]], Any],
    refuse: Callable[..., Any],
    anthropic: bool = False,
) -> Any:
    """What `handle` answers to `raw_request`, whose marks `process` places meanwhile; bad words are refused."""
    body, leads = _body(raw_request), {}
    await ahead.tokenize(serving, raw_request, lambda sent: convert(documents.as_text(sent)[0] if anthropic else sent))
    try:
        if anthropic:
            body, leads = documents.as_text(body)
        paths = marked(body, anthropic)
        said = body_hints(body, lifetimes(body, paths) if paths else [], anthropic)
        segments = chats.asked(body, leads)
    except ConfigError as error:
        return refuse(message=str(error))
    something = paths or segments or said != NO_HINTS
    token = _asked.set(_Asked(body, paths, convert, said, segments) if something else None)
    try:
        return await handle(raw_request)
    finally:
        _asked.reset(token)


def process(original: Callable[..., Any], serving: Any, request: Any, is_multimodal: bool, **options: Any) -> Any:
    """Around SGLang's rendering of a chat request: its breakpoints, segments and hints become `custom_params`."""
    asked, original = _asked.get(), partial(original, **options)
    before = None if asked is None else request.model_copy()
    result = original(serving, request, is_multimodal)
    if asked is None or before is None:
        return result
    media = result.image_data or result.video_data or result.audio_data  # their tokens are not known yet
    rendered_here = request.input_ids is None
    ids = _ids(serving, result) if asked.paths and rendered_here else []
    found = _positions(asked, original, serving, before, ids) if ids else []
    lost = len(asked.paths) - len(found)
    params = dict(request.custom_params or {})
    if found and media:
        placeholders.remember(params, found, ids)
    elif found:
        boundaries.add(params, found)
    if lost:
        logger.warning("the prompt has nothing of what %d of %d cache breakpoints stand on", lost, len(asked.paths))
        params[boundaries.LOST] = lost
    if asked.segments:
        placing = Placing(original, serving, before, result, asked.convert) if rendered_here and not media else None
        _mark_segments(asked, placing, is_multimodal, params)
    if asked.hints != NO_HINTS:
        params.setdefault(hints.KEY, hints.written(asked.hints))
    asked.params.update(params)
    request.custom_params = params
    return result


def _mark_segments(asked: _Asked, placing: Placing | None, is_multimodal: bool, params: dict[str, Any]) -> None:
    """Put what the marked segments became into `params`; `placing` is None where nothing of them is rendered."""
    lost, found = len(asked.segments.paths) + asked.segments.beyond, []
    if placing is not None:
        found, lost = placing.place(asked.body, asked.segments, is_multimodal)
    if found:
        params[segment_params.KEY] = chats.joined(params.get(segment_params.KEY) or [], found)
    if lost:
        logger.warning("%d of %d marked segments became plain text", lost, len(asked.segments.paths))
        params[segment_params.LOST] = lost


def _ids(serving: Any, result: Any) -> list[int]:
    """The tokens of the prompt of `result`, each image one of them; [] for a prompt that will be refused."""
    ids = result.prompt_ids
    if isinstance(ids, str):  # it is encoded later
        ids = serving.tokenizer_manager.tokenizer.encode(ids)
    return [] if len(ids) > serving.tokenizer_manager.context_len else list(ids)


def _positions(asked: _Asked, original: Callable[..., Any], serving: Any, request: Any, ids: list[int]) -> list[int]:
    """The position of every mark that the prompt `ids` has."""
    tokenizer = serving.tokenizer_manager.tokenizer
    real = rendered(original, serving, request)
    found = []
    for path in asked.paths:
        ends = []
        for body in variants(asked.body, path):
            try:
                chat = asked.convert(body)
                other = rendered(
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
