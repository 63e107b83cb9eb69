"""Two conversations that share a system prompt, over the OpenAI API, and what the prefix cache did beside each turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SYSTEM_PROMPT = (
    "You are the assistant of a small research station on an island in the northern sea. Keep every answer short, name "
    "your source when you have one, and never guess a number: say that you do not know. The station keeps three logs: "
    "weather (hourly), boats (arrivals and departures) and birds (sightings with species, count and place). Times are "
    "in UTC, distances in kilometres, temperatures in degrees Celsius. If a question needs more than one log, say "
    "which log each part of the answer comes from. "
)

QUESTIONS = (
    ("Which boats came in yesterday?", "And which of them left again before noon?", "Was the sea calm that morning?"),
    ("How many puffins were seen in May?", "Where on the island was that?", "Compare it with the year before, please."),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One request: `new_tokens` were never sent before, `behind_tokens` were, but no checkpoint covers them."""

    conversation: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    answer_tokens: int
    ttft_seconds: float
    seconds: float
    answer: str

    @property
    def behind_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens - self.new_tokens

    @property
    def reason(self) -> str:
        """Why the uncached tokens were not cached, as far as a client can know."""
        parts = [f"{self.new_tokens} never seen"] if self.new_tokens else []
        if self.behind_tokens > 0:
            parts.append(f"{self.behind_tokens} seen, behind the last checkpoint")
        return ", ".join(parts) or "-"


@dataclass(slots=True)
class _Seen:
    """Token sequences the server has processed."""

    sequences: list[list[int]] = field(default_factory=list)

    def common(self, tokens: list[int]) -> int:
        """Length of the longest prefix of `tokens` that was processed before."""
        longest = 0
        for known in self.sequences:
            pairs = zip(known, tokens, strict=False)
            length = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(known), len(tokens)))
            longest = max(longest, length)
        return longest


def hold(
    client: Any, model: str, to_tokens: Callable[[list[dict[str, str]], str], list[int]], answer_tokens: int = 40
) -> Iterator[Row]:
    """Ask every question, streaming; yields a row per request. The conversations take turns.

    `to_tokens(messages, answer)` gives the server's tokens for a prompt and the answer begun after it.
    """
    seen = _Seen()
    histories = [[{"role": "system", "content": SYSTEM_PROMPT}] for _ in QUESTIONS]
    for turn in range(max(map(len, QUESTIONS))):
        for conversation, messages in enumerate(histories):
            messages.append({"role": "user", "content": QUESTIONS[conversation][turn]})
            prompt = to_tokens(messages, "")
            known = seen.common(prompt)
            answer, usage, ttft, total = _ask(client, model, messages, answer_tokens)
            details = usage.prompt_tokens_details
            cached = (details.cached_tokens or 0) if details else 0
            # One token of a prompt is always computed: its logits are the first token of the answer.
            new = min(max(usage.prompt_tokens - known, 1), usage.prompt_tokens - cached)
            yield Row(
                conversation + 1,
                turn + 1,
                usage.prompt_tokens,
                cached,
                new,
                usage.completion_tokens,
                ttft,
                total,
                answer,
            )
            seen.sequences.append(to_tokens(messages, answer))
            messages.append({"role": "assistant", "content": answer})


def _ask(client: Any, model: str, messages: list[dict[str, str]], tokens: int) -> tuple[str, Any, float, float]:
    start = time.perf_counter()
    first, text, usage = None, [], None
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - start if first is None else first
            text.append(chunk.choices[0].delta.content)
        usage = chunk.usage or usage
    if usage is None or first is None:
        raise RuntimeError(f"the server ended a stream without an answer or without its usage: {''.join(text)!r}")
    return "".join(text), usage, first, time.perf_counter() - start
