"""Anthropic's `document` blocks, which SGLang does not know, as text blocks: title and context, then the text."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.marks.breakpoints import Path, dotted
from sglang_hybrid.engine.frontend.validation.limits import shown

DOCUMENT = "document"
_KEPT = ("cache", "cache_control")


def as_text(body: Any) -> tuple[Any, dict[Path, int]]:
    """`body` of a request to `/v1/messages` with its documents as text blocks, and the characters of each of these
    that stand in front of the document's own text, by path.

    Raises ConfigError, which names the field, for documents that are no text.
    """
    leads: dict[Path, int] = {}
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list):
        return body, leads
    made = [_holder(("messages", at), message, leads, levels=2) for at, message in enumerate(messages)]
    return (body if _same(made, messages) else {**body, "messages": made}), leads


def _holder(path: Path, holder: Any, leads: dict[Path, int], levels: int) -> Any:
    """A message or a tool's result with its documents as text, itself where it has none. Once through: there may be
    any number of them."""
    content = holder.get("content") if isinstance(holder, dict) else None
    if not isinstance(content, list):
        return holder
    made = []
    for at, block in enumerate(content):
        where, kind = (*path, "content", at), block.get("type") if isinstance(block, dict) else None
        if kind == DOCUMENT:
            block = _document(where, block, leads)
        elif kind == "tool_result" and levels > 1:
            block = _holder(where, block, leads, levels - 1)
        made.append(block)
    return holder if _same(made, content) else {**holder, "content": made}


def _same(one: list[Any], other: list[Any]) -> bool:
    return all(a is b for a, b in zip(one, other, strict=True))


def _document(path: Path, block: dict[str, Any], leads: dict[Path, int]) -> dict[str, Any]:
    text = _text(path, block.get("source"))
    lead = "".join(_line(path, block, key) for key in ("title", "context"))
    lead += "\n" if lead else ""
    if text:
        leads[path] = len(lead)
    return {"type": "text", "text": lead + text, **{key: block[key] for key in _KEPT if key in block}}


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
