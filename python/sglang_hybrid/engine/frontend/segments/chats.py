"""The segments of a chat request: its marks become token ranges of the prompt that SGLang renders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.marks.breakpoints import Path, dotted
from sglang_hybrid.engine.frontend.marks.rendering import rendered
from sglang_hybrid.engine.frontend.segments import marks
from sglang_hybrid.engine.frontend.segments.documents import DOCUMENT
from sglang_hybrid.engine.frontend.segments.fences import Fences, Span
from sglang_hybrid.engine.frontend.segments.tokens import ranges
from sglang_hybrid.engine.frontend.settings import settings
from sglang_hybrid.segment.geometry import Range, checked

_BY_ITSELF = 16
"""Marks that get a rendering of their own where the one for all of them does not show them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Marks:
    """The marked pieces of a body; of each document, the characters in front of its text; marks beyond the limit."""

    paths: list[Path] = field(default_factory=list)
    leads: dict[Path, int] = field(default_factory=dict)
    beyond: int = 0

    def __bool__(self) -> bool:
        return bool(self.paths)


def words() -> tuple[bytes, ...]:
    """What the body of a request with segments has in it; () on a server without."""
    if settings().segments != "on":
        return ()
    roles = _roles()
    named = [*roles, *(marks.RESULTS if "tool" in roles else ())]
    return tuple(f'"{word}"'.encode() for word in (marks.CACHE, DOCUMENT, *named))


def _roles() -> frozenset[str]:
    return frozenset(filter(None, map(str.strip, settings().segment_roles.split(","))))


def asked(body: Any, leads: dict[Path, int]) -> Marks:
    """The segments of a chat request's body; raises ConfigError, which names the field, for marks that are none."""
    if settings().segments != "on":
        return Marks()
    paths, beyond = marks.marked(body, _roles(), leads)
    return Marks(paths, leads, beyond)


class Placing:
    """What it takes to place the marks of one request: SGLang's `original` rendering by `serving`, and its `result`
    for `request`; `convert` makes a chat request of a body."""

    def __init__(
        self, original: Callable[..., Any], serving: Any, request: Any, result: Any, convert: Callable[[Any], Any]
    ) -> None:
        self._original, self._serving, self._request, self._result = original, serving, request, result
        self._convert = convert

    def place(self, body: dict[str, Any], marked: Marks, is_multimodal: bool) -> tuple[list[Range], int]:
        """The token ranges of the marks that the prompt has, ascending; and how many marks became plain text."""
        tokenizer, lost = self._serving.tokenizer_manager.tokenizer, len(marked.paths) + marked.beyond
        real = rendered(self._original, self._serving, self._request)
        kind, value = self._serving._engine_prompt(self._result, is_multimodal)
        text, options, ids = real.prompt, real.options, value
        if kind == "text":  # SGLang will encode it once more
            options, ids = {}, tokenizer.encode(value)
        if not isinstance(text, str) or (kind == "text" and value != text):
            return [], lost
        if len(ids) > self._serving.tokenizer_manager.context_len:
            return [], 0  # it will be refused: no more work for it
        spans = self._spans(body, marked, text)
        found = ranges(tokenizer, text, ids, list(spans.values()), options)
        for number, where in zip(spans, found, strict=True):
            if where is None:
                logger.debug("a segment at %s has no text tokens of its own", dotted(marked.paths[number]))
        placed: list[Range] = []
        for where in sorted(filter(None, found)):
            if not placed or placed[-1][1] <= where[0]:
                placed.append(where)
        return placed, lost - len(placed)

    def _spans(self, body: dict[str, Any], marked: Marks, text: str) -> dict[int, Span]:
        numbered = dict(enumerate(marked.paths))
        spans = self._fenced(body, numbered, marked.leads, text)
        missing = [number for number in numbered if number not in spans]
        if len(numbered) > 1:  # one that the template takes in another way with a fence spoils those behind it
            for number in missing[:_BY_ITSELF]:
                spans |= self._fenced(body, {number: numbered[number]}, marked.leads, text)
        return dict(sorted(spans.items()))

    def _fenced(
        self, body: dict[str, Any], numbered: Mapping[int, Path], leads: Mapping[Path, int], text: str
    ) -> dict[int, Span]:
        fences = Fences()
        try:
            chat = self._convert(fences.around(body, numbered, leads))
            changed = {"messages": chat.messages, "tools": chat.tools}
            variant = rendered(self._original, self._serving, self._request.model_copy(update=changed)).prompt
        except Exception as error:  # no mark is worth a request
            logger.debug("segments cannot be placed: %s", error)
            return {}
        return fences.spans(text, variant) if isinstance(variant, str) else {}


def joined(given: Any, found: list[Range]) -> Any:
    """The ranges that a client gave by itself, and those of its marks; what it gave alone if that is none."""
    try:
        return sorted([list(each) for each in (*checked(given), *found)])
    except ConfigError:
        return given  # it is refused when the prompt is tokens
