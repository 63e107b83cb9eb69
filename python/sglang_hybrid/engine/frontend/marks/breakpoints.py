"""Cache breakpoints in the words of chat clients: marks in the body of a request, and where the marked content ends.

`cache_control` stands on Anthropic's tools, system blocks and content blocks, and on the same of OpenAI's bodies as
OpenRouter and LiteLLM send it; `prompt_cache_breakpoint` is OpenAI's, on content parts. A mark says that the prompt up
to and including its content will come again.

A variant of a body has something else behind the marked content. What the prompts of both have in common ends where the
content does, whatever template renders them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.media import is_media
from sglang_hybrid.engine.cache.hints import lifetime_s
from sglang_hybrid.engine.frontend.validation.limits import shown
from sglang_hybrid.prefix.admission import MOST_POSITIONS

CONTROL, BREAKPOINT = "cache_control", "prompt_cache_breakpoint"
ANTHROPIC_MOST = 4
LIFETIMES = ("5m", "1h")
"""Anthropic's; other services take other ones, which are texts as `3600s`."""

_CONVERSATIONS = ("messages", "input")  # of a chat, of `/v1/responses`

Path = tuple[str | int, ...]
"""Keys and indices that lead to a marked piece of a body."""

SOMETHING = "\x1f\u2042other\u2042"
"""What a variant has behind the marked content; a control character in front joins no token of the content."""


def marked(body: Any, anthropic: bool = False) -> list[Path]:
    """The marked pieces of the body of a chat request, in the order of the prompt.

    Raises ConfigError, which names the field, for marks that are none, that stand on nothing, and for too many.
    """
    if not isinstance(body, dict):
        return []
    found = []
    for path, piece in pieces(body):
        if _mark(path, piece, anthropic):
            if _is_empty(piece):
                raise ConfigError(f"{dotted(path)}: empty content cannot be marked; mark the piece before it")
            if str(piece.get("type", "")).endswith("thinking"):
                raise ConfigError(f"{dotted(path)}: thinking cannot be marked; mark the piece behind it")
            found.append(path)
    if _mark((), body, anthropic) and (last := _last(body)) is not None and last not in found:
        found.append(last)
    most = ANTHROPIC_MOST if anthropic else MOST_POSITIONS
    if len(found) > most:
        raise ConfigError(f"a request has at most {most} cache breakpoints: {len(found)}")
    return found


def _is_empty(piece: dict[str, Any]) -> bool:
    """Whether a piece says nothing. The result of a tool may: a command without output is told of all the same."""
    told = piece.get("tool_calls") or piece.get("type") == "tool_result" or piece.get("role") == "tool"
    return piece.get("text") == "" or (piece.get("content") == "" and not told)


def lifetimes(body: dict[str, Any], paths: list[Path]) -> list[Any]:
    """The `ttl` of every mark that has one."""
    known = dict(pieces(body))
    found = [known[path].get(CONTROL) for path in paths if path in known] + [body.get(CONTROL)]
    return [control["ttl"] for control in found if isinstance(control, dict) and control.get("ttl") is not None]


def variants(body: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Bodies that differ from `body` right behind the piece at `path`, and nowhere before; [] where none is known."""
    if path[0] == "tools":
        tools, at = body["tools"], int(path[1])
        made = [{**body, "tools": [*tools[: at + 1], _renamed(tools[at]), *tools[at + 1 :]]}]
        if at + 1 < len(tools):  # what the beginning of any other tool has in common does not count
            made.append({**body, "tools": tools[: at + 1]})
        return made
    piece = get(body, path)
    if is_media(piece):
        around, at = get(body, path[:-1]), int(path[-1])
        return [put(body, path[:-1], [*around[: at + 1], _text_behind(piece), *around[at + 1 :]])]
    other = _longer(piece)
    return [] if other is None else [put(body, path, other)]


def pieces(body: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every part of a body that can be marked."""
    for key in ("tools", "system", *_CONVERSATIONS):
        for at, piece in _dicts(body.get(key)):
            nested = piece.get("function") if key == "tools" else None
            if isinstance(nested, dict) and nested.get(CONTROL) is not None and piece.get(CONTROL) is None:
                piece = {**piece, CONTROL: nested[CONTROL]}
            for field in ("content", "output") if key in _CONVERSATIONS else ():
                for below, part in _dicts(piece.get(field)):
                    yield (key, at, field, below), part
                    for deepest, inner in _dicts(part.get("content")):  # of a tool's result
                        yield (key, at, field, below, "content", deepest), inner
            yield (key, at), piece


def _dicts(value: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(at, each) for at, each in enumerate(value) if isinstance(each, dict)] if isinstance(value, list) else []


def _mark(path: Path, piece: dict[str, Any], anthropic: bool) -> bool:
    """Whether `piece` has a mark; raises ConfigError for one that is none."""
    control, breakpoint_ = piece.get(CONTROL), piece.get(BREAKPOINT)
    if control is not None:
        _check(path, CONTROL, control, "type", ("ephemeral",), required=True)
        if anthropic or lifetime_s(control.get("ttl")) is None:
            _check(path, CONTROL, control, "ttl", LIFETIMES)
    if breakpoint_ is not None:
        _check(path, BREAKPOINT, breakpoint_, "mode", ("explicit",))
    return control is not None or breakpoint_ is not None


def _check(path: Path, name: str, mark: Any, key: str, known: Sequence[str], required: bool = False) -> None:
    field = dotted((*path, name))
    if not isinstance(mark, dict):
        raise ConfigError(f"{field} is an object: {shown(mark)}")
    if (mark.get(key) is not None or required) and mark.get(key) not in known:
        raise ConfigError(f"{field}.{key} is {' or '.join(map(repr, known))}: {shown(mark.get(key))}")


def _last(body: dict[str, Any]) -> Path | None:
    """The last piece of the messages: what a mark of the whole request stands on."""
    paths = [path for path, piece in pieces(body) if path[0] in _CONVERSATIONS and _can_be_followed(piece)]
    return max(paths, key=lambda path: (path[1], len(path) > 2, path), default=None)


def _longer(piece: Any) -> Any:
    """`piece` with more at its end; None where nothing can follow in it."""
    if isinstance(piece, str):
        return piece + SOMETHING
    if not isinstance(piece, dict):
        return None
    if isinstance(piece.get("text"), str):
        return {**piece, "text": piece["text"] + SOMETHING}
    if isinstance(piece.get("input"), dict):  # a call of a tool
        return {**piece, "input": {**piece["input"], SOMETHING: SOMETHING}}
    content, calls = piece.get("content"), piece.get("tool_calls")
    if isinstance(calls, list) and calls:
        last = _longer_call(calls[-1])
        return None if last is None else {**piece, "tool_calls": [*calls[:-1], last]}
    if isinstance(content, list) and content:
        if is_media(content[-1]):
            return {**piece, "content": [*content, _text_behind(content[-1])]}
        last = _longer(content[-1])
        return None if last is None else {**piece, "content": [*content[:-1], last]}
    if isinstance(content, str) or piece.get("type") == "tool_result":
        return {**piece, "content": (content or "") + SOMETHING}
    return None


def _can_be_followed(piece: Any) -> bool:
    return is_media(piece) or _longer(piece) is not None


def _text_behind(media: dict[str, Any]) -> dict[str, Any]:
    kind = "input_text" if str(media["type"]).startswith("input_") else "text"
    return {"type": kind, "text": SOMETHING}


def _longer_call(call: Any) -> Any:
    """An OpenAI call of a tool, whose arguments are JSON in a text, with one argument more."""
    try:
        arguments = json.loads(call["function"]["arguments"])
        return {**call, "function": {**call["function"], "arguments": json.dumps({**arguments, SOMETHING: SOMETHING})}}
    except (KeyError, TypeError, ValueError):
        return None


def _renamed(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    named = {"function": {**function, "name": SOMETHING}} if isinstance(function, dict) else {"name": SOMETHING}
    return {**tool, **named}


def get(body: Any, path: Path) -> Any:
    for key in path:
        body = body[key]
    return body


def put(body: Any, path: Path, piece: Any) -> Any:
    """`body` with another `piece` at `path`; what the two have in common is not copied."""
    if not path:
        return piece
    made = body.copy()
    made[path[0]] = put(body[path[0]], path[1:], piece)
    return made


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many first items two texts or lists have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # slices are compared far faster than items
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def tokens_before(encode: Callable[[str], list[int]], ids: list[int], text: str, end: int) -> int:
    """How many whole tokens of `ids`, which are those of `text`, lie in its first `end` characters.

    Only the shorter side is encoded; it counts if the same tokens come out.
    """
    if len(text) - end < end:
        tail = encode(text[end:])
        if tail and ids[-len(tail) :] == tail:
            return len(ids) - len(tail)
    return shared(encode(text[:end]), ids)
