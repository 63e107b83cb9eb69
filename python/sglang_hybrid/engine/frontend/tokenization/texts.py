"""Texts on their way to tokens: none that no context holds, and long ones beside the event loop.

SGLang tokenises in the event loop and counts tokens afterwards. A text as large as a body may be takes a minute and
gigabytes: meanwhile nobody is answered, a router takes the server for dead, and the kernel may end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.tokenization import token_cache

LONG = 65_536
"""Characters from which on a text, or all texts of a batch, are tokenised in a thread."""

CHARACTERS = 64
"""A token may have so many at least; more, where the vocabulary has a longer one. What a tokenizer takes out or joins
before it looks for tokens is far less."""

Made = tuple[str, dict[str, Any], list[int]]
"""A text, how it was encoded, and its tokens."""

_made: ContextVar[list[Made]] = ContextVar("made")
"""Of the request that is served here, until it is asked for."""

_most: int | None = None
_threads = ThreadPoolExecutor(2, thread_name_prefix="long-texts")
"""Few: each holds some hundred bytes for every token of its text."""


def bound(_: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of `TokenizerManager.init_tokenizer_and_processor`: from here on `require_length` knows the context.

    With `--allow-auto-truncate` any text is served, by its beginning. A tokenizer of a class with its own `encode`, as
    Kimi's, is out of reach of the hook: that one is wrapped.
    """
    from transformers import PreTrainedTokenizerBase

    global _most
    own = getattr(type(manager.tokenizer), "encode", None)
    if own not in (None, PreTrainedTokenizerBase.encode):
        manager.tokenizer.encode = partial(encode, own, manager.tokenizer)
    if manager.tokenizer is None or getattr(manager.server_args, "allow_auto_truncate", False):
        _most = None
        return
    longest = max(map(len, manager.tokenizer.get_vocab()), default=0)
    _most = int(manager.context_len) * max(longest, CHARACTERS)


def require_length(tokenizer: Any, text: Any = None, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of a tokenizer's `__call__`: raise ConfigError for a text that no context holds."""
    if _most is None:
        return
    if isinstance(text, str):
        if len(text) > _most:
            raise ConfigError(f"a text of more than {_most} characters does not fit into the context: {len(text)}")
    elif isinstance(text, (list, tuple)) and text and not isinstance(text[0], int):  # of texts, or pairs of them
        for each in text:
            require_length(tokenizer, each)


def encode(original: Callable[..., Any], tokenizer: Any, text: Any, *args: Any, **options: Any) -> Any:
    """Around a tokenizer's `encode`."""
    found = None if args else known(tokenizer, text, options)
    return original(tokenizer, text, *args, **options) if found is None else found


def encode_prompt(original: Callable[..., Any], tokenizer: Any, text: Any, options: Any = None) -> Any:
    """Around `parallel_prompt_encode`, by which SGLang tokenises chats from 0.5.22 on."""
    found = known(tokenizer, text, options or {})
    return original(tokenizer, text, options) if found is None else found


def known(tokenizer: Any, text: Any, options: dict[str, Any]) -> list[int] | None:
    """The tokens of `text`, with what was tokenised before; None where the tokenizer has to be asked for all of it."""
    require_length(tokenizer, text)
    made = _made.get(None)
    if made and made[0][:2] == (text, options):
        return made.pop()[2]
    return token_cache.tokens_of(tokenizer, text, options)


def remember(made: Made | None) -> None:
    """The next time that this request encodes that text in that way, these are its tokens."""
    _made.set([] if made is None else [made])


def require_piece(text: str, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of `split_prompt`: from 0.5.22 on SGLang tokenises pieces, past the tokenizer's own methods."""
    require_length(None, text)


async def tokenize(original: Callable[..., Any], manager: Any, texts: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `TokenizerManager._tokenize_texts`: long texts leave the event loop to others meanwhile."""
    if manager.async_dynamic_batch_tokenizer is not None:
        return await original(manager, texts, *args, **kwargs)
    return await beside_if(are_long(texts), partial(_tokens, original, manager, texts, *args, **kwargs))


def are_long(texts: Any) -> bool:
    """Whether to tokenise `texts` holds others up: a text, or lists of them."""
    return _characters(texts) >= LONG


async def beside_if(long: bool, work: Callable[[], Any]) -> Any:
    """What `work` on texts returns; while they are long, the event loop goes on."""
    return await beside(work) if long else work()


async def beside(work: Callable[[], Any]) -> Any:
    """What `work` returns, while the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_threads, copy_context().run, work)


def _tokens(original: Callable[..., Any], manager: Any, texts: Any, pairs: bool = False) -> Any:
    """Tokens and their types, None but for texts in `pairs`."""
    found = None if pairs else known(manager.tokenizer, texts, {})
    if found is not None and not getattr(manager.model_config, "is_embedding_gemma", False):  # SGLang adds its end
        return found, None
    return finish(original(manager, texts, pairs))


def _characters(texts: Any) -> int:
    """Of a text, a list of texts, or of pairs of them."""
    return len(texts) if isinstance(texts, str) else sum(map(_characters, texts or ()))


def finish(made: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        made.send(None)
    except StopIteration as done:
        return done.value
    made.close()
    raise RuntimeError("SGLang's tokenisation waits for something")
