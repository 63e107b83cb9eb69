"""Where pieces of a body begin and end in its rendered prompt.

A variant of the body has a fence on either side of each piece: a word of letters and digits that nobody can foresee, so
no text has it and no template escapes it. Cut out again, it says where the piece stands. What differs beside the fences
is white space at a piece's ends, which a template strips from the prompt and not from the variant.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_hybrid.engine.frontend.marks.breakpoints import Path, get, put
from sglang_hybrid.engine.frontend.segments.marks import ends

Span = tuple[int, int]
"""Characters [start, end) of a prompt."""


@dataclass(frozen=True)
class Fences:
    """The fences of one variant."""

    word: str = field(default_factory=lambda: secrets.token_hex(8))

    def _fence(self, side: str, number: int) -> str:
        return f"x{self.word}{side}{number}x"

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(rf"x{self.word}([fb])(\d+)x")

    def around(self, body: Any, marks: Mapping[int, Path], leads: Mapping[Path, int]) -> Any:
        """`body` with fences around its pieces `marks`, by number; `leads` are characters that stay in front."""
        for number, path in marks.items():
            inner = ends(get(body, path))
            assert inner is not None, "a marked piece has text"
            first, last = (*path, *inner[0]), (*path, *inner[1])
            text, lead = get(body, first), leads.get(path, 0)
            body = put(body, first, text[:lead] + self._fence("f", number) + text[lead:])
            body = put(body, last, get(body, last) + self._fence("b", number))
        return body

    def spans(self, prompt: str, variant: str) -> dict[int, Span]:
        """Where the fenced pieces lie in `prompt`, by number; those that `variant` does not have once are left out."""
        fences = list(self.pattern.finditer(variant))
        bounds = [0, *(at for fence in fences for at in fence.span()), len(variant)]
        texts = [variant[low:high] for low, high in zip(bounds[::2], bounds[1::2], strict=True)]
        sides = ["", *(fence[1] for fence in fences), ""]
        at, places = 0, []
        for number, text in enumerate(texts):
            if number:
                places.append(at)
            behind = texts[number + 1] if number < len(fences) and sides[number + 1] == "b" else ""
            length = _length(prompt, at, text, (sides[number] == "f", sides[number + 1] == "b"), behind)
            if length is None:
                break
            at += length
        seen: dict[tuple[str, int], list[int]] = {}
        for fence, place in zip(fences, places, strict=False):
            seen.setdefault((fence[1], int(fence[2])), []).append(place)
        once = {key: where[0] for key, where in seen.items() if len(where) == 1}
        found = {n: (start, once["b", n]) for (side, n), start in once.items() if side == "f" and ("b", n) in once}
        return {number: span for number, span in found.items() if span[0] < span[1]}


def _length(prompt: str, at: int, text: str, stripped: tuple[bool, bool], behind: str) -> int | None:
    """How many characters of `prompt` from `at` on are `text`, if need be without the white space at its `stripped`
    ends, so that `behind` follows; None if they are something else."""
    left, right = text.lstrip() if stripped[0] else text, text.rstrip() if stripped[1] else text
    both = right.lstrip() if stripped[0] else right
    for each in dict.fromkeys((text, left, right, both)):
        if prompt.startswith(each, at) and prompt.startswith(behind, at + len(each)):
            return len(each)
    return None
