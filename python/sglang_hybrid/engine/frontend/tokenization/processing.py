"""One prompt on its way to tokens: processors of images answer, whatever a client sent, and others get their turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.segments.aborts import unless_aborted
from sglang_hybrid.engine.frontend.segments.parallel import outer, prepared
from sglang_hybrid.engine.frontend.validation.limits import shown

logger = logging.getLogger(__name__)

_SERVERS = (ImportError, MemoryError, NotImplementedError)
"""What a server lacks, which no other request would change."""


async def tokenize(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    """Around `TokenizerManager._tokenize_one_request`: what a processor cannot use is the client's mistake.

    Processors read what a client made, with code that expects well-formed images in the number that the prompt has
    places for; what they raise otherwise is of every type. SGLang answers a ValueError with 400 and the rest with 500.

    Between the prompts of a list it waits for nothing: with thousands of them nobody else was answered for seconds.
    """
    whole = outer.get()
    if whole is not None and not whole.is_single:
        await unless_aborted(manager, obj.rid, asyncio.sleep(0))
    try:
        made = await original(manager, obj)
    except ValueError:
        raise
    except Exception as error:
        if not obj.contains_mm_input() or any(isinstance(each, _SERVERS) for each in _chain(error)):
            raise
        logger.warning("the images, videos or sounds of a request cannot be used", exc_info=True)
        raise ConfigError(
            "the images, videos or sounds of this request cannot be used; send as many as its prompt has places for, "
            f"each well-formed: {type(error).__name__} {shown(str(error))}"
        ) from error
    return await prepared(manager, made)


def run(original: Callable[..., Any], executor: Any, *args: Any) -> Any:
    """AROUND hook of `MultimodalProcessorExecutor._run`: a processor that runs out of images says so.

    It raises StopIteration, which no future takes: whoever awaits it waits for ever, and so did the client.
    """
    try:
        return original(executor, *args)
    except StopIteration as error:
        raise ConfigError(
            "the prompt has more places for images, videos or sounds than the request has of them; send one for each "
            "place, and leave the model's own tokens for them out of the text"
        ) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those it was raised for, the newest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
