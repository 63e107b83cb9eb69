"""Anthropic's `document` blocks, which SGLang does not know, as text blocks: title and context, then the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.breakpoints import Path, dotted, get, put
from sglang_hybrid.engine.frontend.limits import shown

DOCUMENT = "document"
_KEPT = ("cache", "cache_control")


def as_text(body: Any) -> tuple[Any, dict[Path, int]]:
    """`body` of a request to `/v1/messages` with its documents as text blocks, and the characters of each of these
    that stand in front of the document's own text, by path.

    Raises ConfigError, which names the field, for documents that are no text.
    """
    leads: dict[Path, int] = {}
    for path in _documents(body):
        block = get(body, path)
        text = _text(path, block.get("source"))
        lead = "".join(_line(path, block, key) for key in ("title", "context"))
        lead += "\n" if lead else ""
        made = {"type": "text", "text": lead + text, **{key: block[key] for key in _KEPT if key in block}}
        body = put(body, path, made)
        if text:
            leads[path] = len(lead)
    return body, leads


def _documents(body: Any) -> list[Path]:
    if not isinstance(body, dict):
        return []
    found: list[Path] = []
    for at, message in _dicts(body.get("messages")):
        for below, block in _dicts(message.get("content")):
            path: Path = ("messages", at, "content", below)
            if block.get("type") == DOCUMENT:
                found.append(path)
            elif block.get("type") == "tool_result":
                inner = _dicts(block.get("content"))
                found += [(*path, "content", deepest) for deepest, each in inner if each.get("type") == DOCUMENT]
    return found


def _dicts(value: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    if isinstance(value, list):
        yield from ((at, each) for at, each in enumerate(value) if isinstance(each, dict))


def _line(path: Path, block: dict[str, Any], key: str) -> str:
    said = block.get(key)
    if said is None or said == "":
        return ""
    if not isinstance(said, str):
        raise ConfigError(f"{dotted(path)}.{key} is a text: {shown(said)}")
    return f"{key.capitalize()}: {said}\n"


def _text(path: Path, source: Any) -> str:
    """The text of a document; several blocks of it are joined by line breaks, as SGLang joins those of a result."""
    field = f"{dotted(path)}.source"
    if not isinstance(source, dict):
        raise ConfigError(f"{field} is an object with the type 'text' or 'content': {shown(source)}")
    kind = source.get("type")
    if kind == "text":
        if not isinstance(source.get("data"), str):
            raise ConfigError(f"{field}.data is the document's text: {shown(source.get('data'))}")
        return str(source["data"])
    if kind == "content":
        content = source.get("content")
        if isinstance(content, str):
            return content
        blocks = list(content) if isinstance(content, list) else [None]
        if not all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in blocks):
            raise ConfigError(f"{field}.content is a text or a list of text blocks: {shown(content)}")
        return "\n".join(each["text"] for each in blocks)
    raise ConfigError(f"{field}.type is 'text' or 'content'; send what is no text as its text: {shown(kind)}")
