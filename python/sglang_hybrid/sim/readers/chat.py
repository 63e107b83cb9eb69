"""Conversations as clients keep them: JSONL with `messages` (OpenAI), `conversations` (ShareGPT) or a batch `body`.

A row that ends with an assistant message is a whole conversation and becomes one request per assistant message. A row
that ends with any other message is one logged request, its answer in `response` if the log kept it; a ShareGPT row is
always a conversation. Rows without a time start one a second; further turns come when their author has typed them at 90
words a minute, as in Marconi's traces.
Without a tokenizer text is cut by `readers.text`, and token counts are estimates.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from sglang_hybrid.sim.readers.reading import Reading
from sglang_hybrid.sim.readers.rows import Row
from sglang_hybrid.sim.readers.text import count_words
from sglang_hybrid.sim.trace import Tokens, TraceError, TraceRequest, make_request

WORDS_PER_S = 1.5
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"} | dict.fromkeys(
    ("chatgpt", "bing", "bard"), "assistant"
)
_TIMES = ("ts", "timestamp", "created", "created_at", "time")


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
        if messages[-1][0] == "assistant" or (whole and any(role == "assistant" for role, _ in messages)):
            return list(self._turns(messages, start, session, row.where))
        answer = row.fields.get("response")
        output = (
            self._reading.encode(_content(answer, row.where)) if answer is not None else np.empty(0, dtype=np.int32)
        )
        prompt = np.concatenate([*(self._encode(role, text) for role, text in messages), _header("assistant")])
        return [make_request(prompt, output, start, session, where=row.where)]

    def _turns(self, messages: list[tuple[str, str]], start: float, session: str, where: str) -> Iterator[TraceRequest]:
        pieces: list[Tokens] = []
        now, turn = start, 0
        for role, text in messages:
            if role != "assistant":
                pieces.append(self._encode(role, text))
                now += count_words(text) / WORDS_PER_S if turn else 0.0
                continue
            header, body = _header(role), self._reading.encode(text)
            yield make_request(np.concatenate([*pieces, header]), body, now, session, turn, where)
            pieces += [header, body]
            turn += 1

    def _encode(self, role: str, text: str) -> Tokens:
        return np.concatenate([_header(role), self._reading.encode(text)])


def _messages(row: Row) -> list[Any]:
    if "messages" in row.fields:
        return row.items("messages")
    if "conversations" in row.fields:
        return row.items("conversations")
    body = row.fields.get("body")
    if isinstance(body, dict):
        return Row(row.where, body).items("messages")
    raise TraceError(f"{row.where}: the row lacks a key: messages")


def _message(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise TraceError(f"{where}: a message must be an object, got {type(message).__name__}")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise TraceError(f"{where}: a message needs a role, got {role!r}")
    text = _content(message.get("content", message.get("value")), where)
    calls = message.get("tool_calls")
    return _ROLES.get(role, role), text if not calls else text + repr(calls)


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
    return np.array([1, zlib.crc32(f"<|{role}|>".encode()) & 0x7FFFFFFF], dtype=np.int32)
