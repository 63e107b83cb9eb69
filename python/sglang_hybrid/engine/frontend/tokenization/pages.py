"""For routers: the names of the pages that a request's prompt has, as this server would render and tokenise it.

A router asks `/v1/tokenize` with the request as `request`, beside an empty prompt. A server without this hook answers
that the prompt is empty, and the router chooses without knowing it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.endpoints import require_template
from sglang_hybrid.engine.frontend.marks.rendering import chat_of
from sglang_hybrid.engine.frontend.segments import documents, prompts
from sglang_hybrid.engine.frontend.tokenization import ahead, texts, token_cache
from sglang_hybrid.engine.frontend.validation.limits import TOKENS, require_integer, require_key
from sglang_hybrid.routing.index import block_hashes

KEY = "request"
"""In the body of `/v1/tokenize`: `{"endpoint": "/v1/messages", "body": {...}, "page_tokens": 64}`."""


async def tokenize(original: Callable[..., Any], serving: Any, adapted: Any, request: Any, raw_request: Any) -> Any:
    """Around `/v1/tokenize`: how many tokens the prompt has, and the names of the pages before its last one."""
    asked = (request.model_extra or {}).get(KEY)
    is_long = len(await ahead.body(raw_request)) >= texts.LONG
    if asked is None:
        answer = original(serving, adapted, request, raw_request)
        if is_long and request.messages is None:
            answer = texts.beside(partial(texts.finish, answer))
        return await texts.beside_if(is_long, partial(_written, await answer, serving))
    from fastapi.responses import JSONResponse

    if not isinstance(asked, dict) or not isinstance(body := asked.get("body"), dict):
        raise ConfigError(f"{KEY} has an endpoint and the body of a request to it: {str(asked)[:80]!r}")
    require_template(body)
    page_tokens, salt = asked.get("page_tokens"), body.get("cache_salt")
    require_integer(page_tokens, 1, TOKENS, "page_tokens")
    if salt is not None:
        require_key(salt, "cache_salt")
    token_cache.enter(body.get("extra_key"), salt)
    endpoint, state = str(asked.get("endpoint")), raw_request.app.state
    if endpoint in _CHATS:
        await ahead.tokenize(serving.chat_serving, raw_request, lambda _: _CHATS[endpoint](body, state))
        ids = _ids(serving, endpoint, body, state)
    else:
        ids = await texts.beside_if(is_long, partial(_ids, serving, endpoint, body, state))
    names = await texts.beside_if(is_long, partial(block_hashes, ids[:-1], int(page_tokens), salt))
    return JSONResponse({"tokens": [], "count": len(ids), "names": names})


def _written(answer: Any, serving: Any) -> Any:
    """`answer` as JSON, which FastAPI makes of each number by itself: two seconds for a million tokens, and nobody is
    answered meanwhile.

    It has the context for a longest text beyond 64 bits, which 0.5.17 cannot write: 500 for tokenizers that know none.
    """
    if getattr(answer, "max_model_len", None) is None:
        return answer  # it says what is wrong with the question
    import orjson
    from fastapi.responses import Response

    if answer.max_model_len >= 2**64:
        answer.max_model_len = serving.tokenizer_manager.model_config.context_len
    return Response(orjson.dumps(vars(answer)), media_type="application/json")


def _ids(serving: Any, endpoint: str, body: dict[str, Any], state: Any) -> list[int]:
    """The prompt of a request to `endpoint`; raises ConfigError, or what SGLang raises for a body it cannot read."""
    tokenizer = serving.tokenizer_manager.tokenizer
    prompt = body.get("prompt") if endpoint == "/v1/completions" else body.get("text")
    if endpoint in ("/v1/completions", "/generate"):
        if not isinstance(prompt, str):
            raise ConfigError(f"the prompt of one sequence is a text: {str(prompt)[:80]!r}")
        return prompts.prompt(tokenizer, prompt)
    if endpoint not in _CHATS:
        raise ConfigError(f"no prompt is known of requests to this endpoint: {endpoint}")
    try:
        return list(serving._tokenize_chat_request(_Chat(_CHATS[endpoint](body, state))))
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"the body has another shape: {error}") from error


class _Chat:
    """What SGLang's tokenisation asks of a request."""

    def __init__(self, chat: Any) -> None:
        self._chat = chat

    def to_chat_completion_request(self) -> Any:
        return self._chat


def _openai(body: dict[str, Any], state: Any) -> Any:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    return ChatCompletionRequest.model_validate(body)


def _anthropic(body: dict[str, Any], state: Any) -> Any:
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    request = AnthropicMessagesRequest.model_validate(documents.as_text(body)[0])
    return state.anthropic_serving._convert_to_chat_completion_request(request)


def _responses(body: dict[str, Any], state: Any) -> Any:
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

    return chat_of(state.openai_serving_responses, ResponsesRequest.model_validate(body))


_CHATS: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "/v1/chat/completions": _openai,
    "/v1/messages": _anthropic,
    "/v1/responses": _responses,
}
