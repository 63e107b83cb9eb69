"""The pieces of a chat request's body that are segments: marked by the client, or named by a flag of the server."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.marks.breakpoints import Path, dotted, pieces
from sglang_hybrid.engine.frontend.validation.limits import shown
from sglang_hybrid.segment.geometry import MOST_SEGMENTS

CACHE, SEGMENT = "cache", "segment"
"""The mark: `"cache": "segment"`."""

RESULTS = ("tool_result", "function_call_output")
"""What Anthropic's messages and OpenAI's responses call messages of the role `tool`."""

_ORDER = ("system", "messages", "input")


def marked(body: Any, roles: Collection[str] = (), documents: Collection[Path] = ()) -> tuple[list[Path], int]:
    """The pieces that are segments, in the order of the prompt, and how many more there are than a request may have.

    `roles` are roles or names of messages that are segments as a whole; `documents` are pieces that are segments
    anyway. A piece within which another is a segment is none. Raises ConfigError, which names the field, for marks that
    are none, that stand on anything but text, and for too many of them.
    """
    if not isinstance(body, dict):
        return [], 0
    said, named = set(), set()
    for path, piece in pieces(body):
        mark = piece.get(CACHE)
        if mark is not None:
            _check(path, piece, mark)
            said.add(path)
        elif path in documents or (roles and _is_named(path, piece, roles)):
            named.add(path)
    outer = {path[:depth] for path in said | named for depth in range(len(path))}
    if len(said - outer) > MOST_SEGMENTS:
        raise ConfigError(f"a request may mark {MOST_SEGMENTS} segments: {len(said - outer)}")
    found = sorted((said | named) - outer, key=lambda path: (_ORDER.index(str(path[0])), path[1:]))
    return found[:MOST_SEGMENTS], max(0, len(found) - MOST_SEGMENTS)  # the first ones: a next turn has the same


def ends(piece: Any, levels: int = 3) -> tuple[Path, Path] | None:
    """The keys that lead to the first and to the last text of `piece`, None where one of these is no text."""
    if not isinstance(piece, dict) or not levels:
        return None
    if isinstance(piece.get("text"), str):
        return ("text",), ("text",)
    for name in ("content", "output"):
        inner = piece.get(name)
        if isinstance(inner, str):
            return (name,), (name,)
        if isinstance(inner, list) and inner:
            first, last = ends(inner[0], levels - 1), ends(inner[-1], levels - 1)
            if first is not None and last is not None:
                return (name, 0, *first[0]), (name, len(inner) - 1, *last[1])
    return None


def _is_named(path: Path, piece: dict[str, Any], roles: Collection[str]) -> bool:
    if ends(piece) is None or _empty(piece):
        return False
    kind = piece.get("type")
    if isinstance(kind, str) and kind in RESULTS:
        return "tool" in roles
    is_message = len(path) == 2 and path[0] in ("messages", "input")
    called = [piece.get(key) for key in ("role", "name")]
    return is_message and any(isinstance(each, str) and each in roles for each in called)


def _empty(piece: dict[str, Any]) -> bool:
    return "" in (piece.get("text"), piece.get("content"), piece.get("output"))


def _check(path: Path, piece: dict[str, Any], mark: Any) -> None:
    field, kind = dotted(path), str(piece.get("type") or piece.get("role") or "")
    if mark != SEGMENT:
        raise ConfigError(f"{field}.{CACHE} is {SEGMENT!r}: {shown(mark)}")
    if path[0] == "tools":
        raise ConfigError(f"{field}.{CACHE}: tools are no segments; mark where they end, with cache_control: {mark!r}")
    if not ends(piece) or kind.endswith(("thinking", "reasoning")):
        raise ConfigError(
            f"{field}.{CACHE}: only text is a segment, in text parts, messages, results and documents: {shown(kind)}"
        )
    if _empty(piece):
        raise ConfigError(f"{field}.{CACHE}: empty text is no segment; leave the mark out: {mark!r}")
