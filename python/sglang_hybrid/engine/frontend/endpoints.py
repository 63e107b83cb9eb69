"""A client's mistake is a 4xx at every endpoint: SGLang answers some with 500 and a traceback, or half a stream."""

from __future__ import annotations

import contextvars
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.frontend.segments import documents
from sglang_hybrid.engine.frontend.server import identity
from sglang_hybrid.engine.frontend.validation.limits import shown

_MISSHAPEN = (AttributeError, KeyError, IndexError, TypeError, OverflowError, RecursionError)
_LARGEST_ID = 2**32 - 1
_LEVELS = range(4)
_WITH_DOCUMENTS = ("AnthropicMessagesRequest", "AnthropicCountTokensRequest")

_REPLICAS = "weights of several replicas (--dp-size) come from a folder, /update_weights_from_disk: "
_MISTAKEN: dict[str, tuple[type[Exception], str]] = {
    "vertex_generate": (TypeError, "parameters are those of /generate: "),
    "start_profile_async": (RuntimeError, ""),
    "stop_profile_async": (RuntimeError, ""),
    "update_weights_from_tensor": (AssertionError, _REPLICAS),
    "update_weights_from_distributed": (AssertionError, _REPLICAS),
    "init_weights_update_group": (AssertionError, _REPLICAS),
    "destroy_weights_update_group": (AssertionError, _REPLICAS),
    "remove_external_corpus": (AttributeError, 'the body is an object, {"corpus_id": ...}: '),
}
"""Endpoints that raise something else for a client's mistake, and what it means."""

_unrendered: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("unrendered", default=None)
"""At Anthropic's endpoints: what the chat template or the tokenizer had against the messages."""

logger = logging.getLogger(__name__)


async def read_body(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A body of another shape than the validators of SGLang's request models expect: null, a list, a number within.

    Documents in a body for Anthropic's endpoints become text before SGLang refuses them.
    """
    from fastapi.exceptions import RequestValidationError

    try:
        if "received_body" in kwargs:
            require_template(kwargs["received_body"])
            kwargs["received_body"] = _salted(kwargs["received_body"], kwargs.get("body_fields"))
        if _is_anthropic(kwargs.get("body_fields")):
            kwargs["received_body"], _ = documents.as_text(kwargs["received_body"])
        return await original(*args, **kwargs)
    except ConfigError as error:
        raise RequestValidationError([{"type": "value_error", "loc": ("body",), "msg": str(error)}]) from error
    except _MISSHAPEN as error:
        problem = {"type": "value_error", "loc": ("body",), "msg": f"the body has another shape: {error}"}
        raise RequestValidationError([problem]) from error


def require_template(body: Any) -> None:
    """Raise ConfigError for a chat template of the client's own: it is a program, which may run for ever.

    SGLang refuses one at `/v1/chat/completions`, but renders it at `/v1/responses` and `/v1/decisions`, and with 0.5.17
    everywhere.
    """
    given = body.get("chat_template_kwargs") if isinstance(body, dict) else None
    if isinstance(given, dict) and "chat_template" in given and not compat.trusts_templates():
        raise ConfigError(
            "templates of requests are rendered only if --trust-request-chat-template was given to the server (SGLang "
            f"0.5.21 and later); drop chat_template_kwargs.chat_template: {shown(given['chat_template'])}"
        )


def mistaken(original: Callable[..., None], error: Any, errors: Any, *, body: Any = None, **_: Any) -> None:
    """FastAPI's error of a body that its model refuses, which SGLang sends to the client as it prints it: without the
    whole body in it, and without the file and line of the endpoint."""
    original(error, [{**one, "input": shown(one["input"])} if "input" in one else one for one in errors], body=body)


def _is_anthropic(fields: Any) -> bool:
    return any(getattr(model, "__name__", "") in _WITH_DOCUMENTS for model in _models(fields))


def _models(fields: Any) -> list[Any]:
    return [getattr(getattr(field, "field_info", None), "annotation", None) for field in fields or ()]


def _salted(body: Any, fields: Any) -> Any:
    """A body for `/generate` of SGLang 0.5.17, which knows no salt there, ignores it, and serves one tenant's cache to
    another: it becomes part of the extra key, as at OpenAI's endpoints."""
    if not isinstance(body, dict) or (salt := body.get("cache_salt")) is None:
        return body
    native = [model for model in _models(fields) if getattr(model, "__name__", "") == "GenerateReqInput"]
    if not native or "cache_salt" in native[0].__dataclass_fields__:
        return body
    key = body.get("extra_key")
    if not isinstance(salt, str) or not isinstance(key, str | None):
        raise ConfigError(f"with this SGLang cache_salt is one text, for all prompts: {shown(salt)}")
    return {**body, "extra_key": salt + (key or "")}


async def call(original: Callable[..., Any], *, dependant: Any, **kwargs: Any) -> Any:
    """Run an endpoint; a ValueError, SGLang's word for a bad request, is one where the endpoint does not say so."""
    from fastapi import HTTPException

    try:
        with identity.shared():
            return await original(dependant=dependant, **kwargs)
    except ValueError as error:
        logger.warning("a bad request: %s", shown(str(error)))
        raise HTTPException(400, str(error)) from error
    except (AssertionError, AttributeError, RuntimeError, TypeError) as error:
        kind, meant = _MISTAKEN.get(getattr(dependant.call, "__name__", ""), (ValueError, ""))
        if not isinstance(error, kind):
            raise
        raise HTTPException(400, f"{meant}{error}") from error


def render(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Messages and `chat_template_kwargs` that the model's template cannot render are the client's, as SGLang has it
    for the errors it expects of a template."""
    try:
        return original(*args, **kwargs)
    except _MISSHAPEN as error:
        refused = ConfigError(
            "the chat template cannot render this request; check messages, tools and chat_template_kwargs: "
            f"{shown(error)}"
        )
        _note(refused)
        raise refused from error
    except ValueError as error:
        _note(error)
        raise


def _note(error: ValueError) -> None:
    if (noted := _unrendered.get()) is not None:
        noted.append(str(error))


async def count_tokens(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """SGLang says 500 for messages that the template cannot render, and for a text that is too long, here."""
    from fastapi import HTTPException

    answer, refused = await rendering(original(*args, **kwargs))
    if refused:
        raise HTTPException(400, refused)
    return answer


async def rendering(answering: Awaitable[Any]) -> tuple[Any, str]:
    """An answer of one of Anthropic's endpoints, and what the client has to hear in place of its 500, if anything."""
    refused: list[str] = []
    token = _unrendered.set(refused)
    try:
        answer = await answering
    finally:
        _unrendered.reset(token)
    return answer, refused[-1] if refused and getattr(answer, "status_code", 200) >= 500 else ""


def detokenize(_: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse numbers that are no token of any vocabulary; the tokenizer raises what SGLang calls its own error."""
    nested = [each if isinstance(each, list) else [each] for each in request.tokens]
    for ids in nested:
        if ids and not 0 <= min(ids) <= max(ids) <= _LARGEST_ID:
            raise ConfigError(f"tokens are whole numbers from 0 to {_LARGEST_ID}: {shown(ids)}")


def require_messages(_: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a chat without messages."""
    if not request.messages:
        raise ConfigError("messages has at least one message: []")


def check_recorder(manager: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse to record how experts are used where nothing records it; SGLang's scheduler would end on it."""
    if manager.server_args.expert_distribution_recorder_mode is None:
        raise ConfigError(
            "this server records no use of experts; start it with --expert-distribution-recorder-mode stat"
        )


def check_logging(_: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse settings of logs that there are not. SGLang keeps them, refuses them then, and fails at every request."""
    if request.log_requests_level not in (None, *_LEVELS):
        raise ConfigError(f"log_requests_level is 0, 1, 2 or 3: {shown(request.log_requests_level)}")
    if request.log_requests_format not in (None, "text", "json"):
        raise ConfigError(f"log_requests_format is text or json: {shown(request.log_requests_format)}")
    if request.log_level is not None and request.log_level.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(f"log_level is debug, info, warning, error or critical: {shown(request.log_level)}")


async def ollama_stream(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ollama's streams tell of a bad request in a line of their own; SGLang's break off."""
    response = await original(*args, **kwargs)
    response.body_iterator = _told(response.body_iterator)
    return response


async def _told(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for line in lines:
            yield line
    except ValueError as error:
        yield json.dumps({"error": str(error)}).encode() + b"\n"
