"""Conversations as clients keep them: JSONL with `messages` (OpenAI), `conversations` (ShareGPT) or a batch `body`.

A row that ends with an assistant message is a whole conversation and becomes one request per assistant message. A row
that ends with any other message is one logged request, its answer in `response` if the log kept it; a ShareGPT row is
always a conversation. Rows without a time start one a second; further turns come when their author has typed them at 90
words a minute, as in Marconi's traces. What is marked with `"cache": "segment"`, a message or a part of its content, is
tokenised by itself, as servers do.
Without a tokenizer text is cut by `readers.text`, and token counts are estimates.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sglang_hybrid.sim.readers.reading import Reading
from sglang_hybrid.sim.readers.rows import Row
from sglang_hybrid.sim.readers.text import count_words
from sglang_hybrid.sim.trace import Segment, Tokens, TraceError, TraceRequest, make_request

WORDS_PER_S = 1.5
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"} | dict.fromkeys(
    ("chatgpt", "bing", "bard"), "assistant"
)
_SEGMENT = "segment"
_TIMES = ("ts", "timestamp", "created", "created_at", "time")


class _Message(NamedTuple):
    """`pieces` are its texts in order, each with whether it is a segment; no two that are none follow each other."""

    role: str
    pieces: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


class _Prompt:
    """The tokens of messages one after the other, and where their segments lie."""

    def __init__(self, reading: Reading) -> None:
        self._reading, self._pieces = reading, list[Tokens]()
        self._size = 0
        self.segments: list[Segment] = []

    @property
    def tokens(self) -> Tokens:
        return np.concatenate(self._pieces)

    def add(self, message: _Message) -> None:
        self.extend(_header(message.role))
        for text, marked in message.pieces:
            start = self._size
            self.extend(self._reading.encode(text))
            if marked and self._size > start:
                self.segments.append(Segment(start, self._size))

    def extend(self, tokens: Tokens) -> None:
        self._pieces.append(tokens)
        self._size += tokens.size


class Chat:
    """Takes one conversation after the other; `reading` turns text into tokens."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._rows = 0

    def __call__(self, row: Row) -> list[TraceRequest]:
        """Requests of a row; raises TraceError for one without messages."""
        start, self._rows = _time(row, float(self._rows)), self._rows + 1
        messages = [_message(m, row.where) for m in _messages(row)]
        whole = "conversations" in row.fields  # ShareGPT: never a request as a server logs it
        if not messages and whole:
            self._reading.notes["conversations without a message were left out"] += 1
            return []
        if not messages:
            raise TraceError(f"{row.where}: a conversation needs at least one message, got {len(messages)}")
        session = next((row.text(k, "") for k in ("session_id", "conversation_id", "id") if k in row.fields), row.where)
        if messages[-1].role == "assistant" or (whole and any(each.role == "assistant" for each in messages)):
            return list(self._turns(messages, start, session, row.where))
        answer = row.fields.get("response")
        output = (
            self._reading.encode(_content(answer, row.where)) if answer is not None else np.empty(0, dtype=np.int32)
        )
        prompt = _Prompt(self._reading)
        for message in messages:
            prompt.add(message)
        prompt.extend(_header("assistant"))
        return [make_request(prompt.tokens, output, start, session, where=row.where, segments=prompt.segments)]

    def _turns(self, messages: Sequence[_Message], start: float, session: str, where: str) -> Iterator[TraceRequest]:
        prompt = _Prompt(self._reading)
        now, turn = start, 0
        for message in messages:
            if message.role != "assistant":
                prompt.add(message)
                now += count_words(message.text) / WORDS_PER_S if turn else 0.0
                continue
            prompt.extend(_header(message.role))
            body = self._reading.encode(message.text)
            yield make_request(prompt.tokens, body, now, session, turn, where, segments=prompt.segments)
            prompt.extend(body)
            turn += 1


def _messages(row: Row) -> list[Any]:
    if "messages" in row.fields:
        return row.items("messages")
    if "conversations" in row.fields:
        return row.items("conversations")
    body = row.fields.get("body")
    if isinstance(body, dict):
        return Row(row.where, body).items("messages")
    raise TraceError(f"{row.where}: the row lacks a key: messages")


def _message(message: Any, where: str) -> _Message:
    if not isinstance(message, dict):
        raise TraceError(f"{where}: a message must be an object, got {type(message).__name__}")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise TraceError(f"{where}: a message needs a role, got {role!r}")
    content, whole = message.get("content", message.get("value")), message.get("cache") == _SEGMENT
    parts = content if isinstance(content, list) and not whole else [content]
    marked = [isinstance(part, dict) and part.get("cache") == _SEGMENT for part in parts]
    texts = [
        (_content(part if part is content else [part], where), its) for part, its in zip(parts, marked, strict=True)
    ]
    if whole:
        texts = [(text, True) for text, _ in texts]
    calls = message.get("tool_calls")
    return _Message(_ROLES.get(role, role), _joined(texts if not calls else [*texts, (repr(calls), False)]))


def _joined(texts: list[tuple[str, bool]]) -> tuple[tuple[str, bool], ...]:
    found: list[tuple[str, bool]] = []
    for text, marked in texts:
        if found and not marked and not found[-1][1]:
            found[-1] = found[-1][0] + text, False
        else:
            found.append((text, marked))
    return tuple(found)


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):  # OpenAI content parts; anything that is not text counts by its reference
        return "".join(str(p.get("text", p)) if isinstance(p, dict) else str(p) for p in content)
    if isinstance(content, dict):  # a logged completion
        choices = content.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            inner = choices[0].get("message", choices[0])
            return _content(inner.get("content", inner.get("text")) if isinstance(inner, dict) else None, where)
    raise TraceError(f"{where}: content must be text or a list of parts, got {type(content).__name__}")


def _time(row: Row, default: float) -> float:
    return next((row.seconds(key) for key in _TIMES if row.fields.get(key) is not None), default)


def _header(role: str) -> Tokens:
    """Two ids that open a message of this role, outside the range of `tokenize` collisions for practical purposes."""
    return np.array([1, zlib.crc32(f"<|{role}|>".encode("utf-8", "surrogatepass")) & 0x7FFFFFFF], dtype=np.int32)
