"""Which tokens of a prompt are a piece of text, whatever stands beside it.

A tokenizer joins the ends of a text with what is next to it: a first word with the space before it, a full stop with
the line break behind it. A segment is found again only if it has the same tokens, so those at its ends that depend on
their neighbours are left to the plain text. A text has the same segment in a chat, between separators and by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_hybrid.engine.frontend.marks.breakpoints import shared, tokens_before
from sglang_hybrid.engine.frontend.segments.fences import Span
from sglang_hybrid.segment.geometry import Range

_BEFORE = ("", " ", "\n", ">", "x ")
_BEHIND = ("", " x", "\n", "\n\nx", "</x")
"""What stands beside texts in templates and prompts."""

_WINDOW = 96
"""Characters at the end of a text whose tokens are compared; neighbours do not reach further."""

_SLOWLY = 1 << 24
"""Characters that one request may have encoded again where the tokenizer cannot say where its tokens lie."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a text, and for each the characters it covers: from `starts` up to `ends` (int64, [n]).

    White space that a tokenizer counts to no token counts to both tokens beside it.
    """

    ids: Sequence[int]
    starts: np.ndarray
    ends: np.ndarray

    def inside(self, span: Span) -> Range | None:
        """The tokens that lie in the characters of `span` as a whole, None if there is none."""
        low, high = span
        found = np.flatnonzero((self.starts >= low) & (self.ends <= high) & (self.ends > self.starts))
        return (int(found[0]), int(found[-1]) + 1) if found.size else None


def encoded(tokenizer: Any, texts: Sequence[str], options: Mapping[str, Any]) -> list[Encoded] | None:
    """The tokens of each text; None from a tokenizer that cannot say where they lie."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    made = tokenizer(list(texts), return_offsets_mapping=True, **options)
    found = []
    for ids, offsets in zip(made["input_ids"], made["offset_mapping"], strict=True):
        pairs = np.array(offsets, np.int64).reshape(-1, 2)
        starts, ends = pairs[:, 0].copy(), pairs[:, 1].copy()
        starts[1:] = np.minimum(pairs[1:, 0], pairs[:-1, 1])
        ends[:-1] = np.maximum(pairs[:-1, 1], pairs[1:, 0])
        found.append(Encoded(ids, starts, ends))
    return found


def stable(tokenizer: Any, text: str) -> Span:
    """The characters of `text` whose tokens do not depend on what stands beside it; all where that is not known."""
    head, tail = text[:_WINDOW], text[-_WINDOW:]
    texts = [*(each + head for each in _BEFORE), *(tail + each for each in _BEHIND)]
    found = encoded(tokenizer, texts, {"add_special_tokens": False})
    if found is None:
        return 0, len(text)
    fronts, backs = found[: len(_BEFORE)], found[len(_BEFORE) :]
    alone = fronts[0]
    first = len(alone.ids) - min(shared(alone.ids[::-1], each.ids[::-1]) for each in fronts[1:])
    while 0 < first < len(alone.ids) and alone.starts[first] == alone.starts[first - 1]:
        first += 1  # inside of a character
    low = int(alone.starts[first]) if first < len(alone.ids) else 0
    alone = backs[0]
    last = min(shared(alone.ids, each.ids) for each in backs[1:])
    while 0 < last < len(alone.ids) and alone.ends[last - 1] == alone.ends[last]:
        last -= 1
    high = len(text) - len(tail) + (int(alone.ends[last - 1]) if last else len(tail))
    return (low, high) if low < high else (0, len(text))


def ranges(
    tokenizer: Any, text: str, ids: Sequence[int], spans: Sequence[Span], options: Mapping[str, Any]
) -> list[Range | None]:
    """The tokens of each of `spans` in the prompt `text`, whose tokens begin with those that `options` make of it.

    None for a span that has no token by itself, and for one that holds special tokens: a text that spells them is no
    text to the model.
    """
    trimmed = []
    for low, high in spans:
        inner = stable(tokenizer, text[low:high])
        trimmed.append((low + inner[0], low + inner[1]))
    made = encoded(tokenizer, [text], options)
    if made is None:
        found = _slowly(lambda part: list(tokenizer.encode(part, **options)), text, ids, trimmed)
    else:
        same = list(ids[: len(made[0].ids)]) == list(made[0].ids)
        found = [made[0].inside(span) if same else None for span in trimmed]
    special = _special(tokenizer)
    return [None if each is None or not special.isdisjoint(ids[each[0] : each[1]]) else each for each in found]


def _special(tokenizer: Any) -> set[int]:
    """The ids of tokens that are no text, such as the marks of a chat template."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token for token, what in added.items() if getattr(what, "special", False))}


def _slowly(
    encode: Callable[[str], list[int]], text: str, ids: Sequence[int], spans: Sequence[Span]
) -> list[Range | None]:
    """The same by encoding the text from each span's start on, and up to its end."""
    found: list[Range | None] = []
    known = list(ids)
    for low, high in spans:
        if (len(found) + 1) * len(text) > _SLOWLY:
            return [*found, *[None] * (len(spans) - len(found))]
        start = len(known) - shared(encode(text[low:])[::-1], known[::-1])
        end = tokens_before(encode, known, text, high)
        found.append((start, end) if start < end else None)
    return found
