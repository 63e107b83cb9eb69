"""Compiled grammars of clients: SGLang's scheduler keeps every one it ever compiled, up to ten megabytes each."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.engine.frontend.validation.limits import GRAMMARS


def keep(_: None, backend: Any, key: tuple[str, str], value: Any) -> None:
    """Forget all others when the texts of the kept ones are too long together; who runs has a copy of its own."""
    if sum(len(text) for _, text in backend.cache) > GRAMMARS:
        backend.reset()  # with the compiler's own cache
        inner = getattr(backend, "grammar_backend", None)
        if inner is not None:  # of --reasoning-parser, whose backend stands around another and resets itself alone
            inner.reset()
        backend.cache[key] = value
