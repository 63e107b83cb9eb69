"""Long chats are tokenised beside the event loop; when SGLang then does it in there, their tokens are known."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from sglang_hybrid.engine.frontend.marks.rendering import rendered
from sglang_hybrid.engine.frontend.tokenization import texts

logger = logging.getLogger(__name__)


async def tokenize(serving: Any, raw_request: Any, chat: Callable[[Any], Any]) -> None:
    """Tokenise the prompt that `serving` will make of `chat(body)`, a chat request, if the body is long.

    To read and to render it twice takes some milliseconds, to tokenise it takes a hundred times as long.
    """
    raw = await body(raw_request)
    if len(raw) >= texts.LONG:
        texts.remember(await texts.beside(lambda: _tokenize(serving, lambda: chat(json.loads(raw)))))


async def body(raw_request: Any) -> bytes:
    """That of a request, which was read already; not every caller of SGLang's has one."""
    read = getattr(raw_request, "body", None)
    return b"" if read is None else await read()


def _tokenize(serving: Any, chat: Callable[[], Any]) -> texts.Made | None:
    """What has to be remembered, for no cache does: of tokenizers whose texts cannot be cut."""
    try:
        tokenizer = serving.tokenizer_manager.tokenizer
        real = rendered(type(serving)._process_messages, serving, chat())
        if isinstance(real.prompt, str) and texts.known(tokenizer, real.prompt, real.options) is None:
            return real.prompt, real.options, list(tokenizer.encode(real.prompt, **real.options))
    except Exception as error:  # it is told when SGLang meets it
        logger.debug("a chat is not tokenised ahead: %s", error)
    return None
