"""Where a segment's seams and its interior lie, and which ranges of a prompt a client may mark as segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.segment.keys import CODES

MOST_SEGMENTS = 256
LEAST_TOKENS = 64
"""A shorter segment is computed like plain text: its seams and the jump cost what its interior would save."""
MOST_SEAM = 1024

Range = tuple[int, int]
"""Tokens [start, end) of a prompt."""


@dataclass(frozen=True, slots=True)
class Seams:
    """How a segment of n tokens is divided: `head` tokens, an interior, `tail` tokens.

    The interior is computed once, by itself, and then reused. The seams are computed with every use, in their context.
    `window` is how many tokens a convolution looks back: those at the head would see the wrong ones, so a narrower
    head is widened to it (HYPIC, section 4.2), and the last of the interior are what the tail looks back on.
    """

    width: int
    window: int

    def __post_init__(self) -> None:
        if not 0 <= self.width <= MOST_SEAM:
            raise ConfigError(f"seam tokens must be between 0 and {MOST_SEAM}: {self.width}")
        if self.window < 0:
            raise ConfigError(f"a convolution looks back on no fewer than 0 tokens: {self.window}")

    @property
    def head(self) -> int:
        return max(self.width, self.window)

    @property
    def tail(self) -> int:
        return self.width

    @property
    def least(self) -> int:
        """Tokens of the shortest segment that is reused: its interior fills the window, has a token for each code, and
        saves what it costs."""
        return max(LEAST_TOKENS, self.head + self.tail + max(self.window, CODES))

    def interior(self, segment: Range) -> Range:
        """The tokens of `segment` that are reused; only for one of at least `least` tokens."""
        return segment[0] + self.head, segment[1] - self.tail


def checked(ranges: Any, prompt_tokens: int | None = None) -> tuple[Range, ...]:
    """The ranges [[start, end], ...] that a client marked, ascending and apart; adjacent ones may touch.

    `prompt_tokens` is the length of the prompt, None where it is not known yet. Raises ConfigError for anything else.
    """
    if not isinstance(ranges, Sequence) or isinstance(ranges, str):
        raise ConfigError(f"segments must be a list of [start, end) token positions: {_short(ranges)}")
    if len(ranges) > MOST_SEGMENTS:
        raise ConfigError(f"a request may mark {MOST_SEGMENTS} segments: {len(ranges)}")
    found: list[Range] = []
    for each in ranges:
        if not isinstance(each, Sequence) or len(each) != 2 or any(type(at) is not int for at in each):
            raise ConfigError(f"a segment must be [start, end), two whole numbers of tokens: {_short(each)}")
        start, end = each
        if start < 0 or (prompt_tokens is not None and end > prompt_tokens):
            raise ConfigError(f"a segment must lie in the {prompt_tokens} tokens of the prompt: {_short([start, end])}")
        if end <= start:
            raise ConfigError(f"a segment must end behind its start: {_short([start, end])}")
        if found and start < found[-1][1]:
            raise ConfigError(
                f"segments must be in order and must not overlap: {_short([start, end])} after {list(found[-1])}"
            )
        found.append((start, end))
    return tuple(found)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
