"""Two conversations over the same documents, over the OpenAI API, and what the prefix cache did beside each turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

DOCUMENTS = (
    "The Tolvik mill is kept by Mara Berham. We were told that the gate of the Tolvik mill opens with 4821. In the "
    "morning the old boat looks quiet.",
    "The home town of Mara Berham is Halfors, as everyone knows. For years Mara Berham has worked as a baker.",
    "Note that the Novton museum opens at 9:30. A ticket for the Novton museum costs 14 crowns. It rained for days, "
    "and the bridge was broken.",
    "The Kalstad concert takes place on Friday. Everyone knows that the Kalstad concert has invited Emil Brimton.",
    "By the way, Emil Brimton plays the trumpet. Emil Brimton has a sister called Clara Pelholm.",
    "The Grimsen crane is run by Jonas Remtan. The speed of the Grimsen crane is 375.",
    "Many people like the Kalstad concert in the winter. The instrument of Clara Pelholm is piano, they say.",
    "There is news: the Novton museum opens at 10:45.",
)

SYSTEM_PROMPT = "Answer from the documents.\n\n" + "\n\n".join(
    f"Document {number}. {text}" for number, text in enumerate(DOCUMENTS, 1)
)

CONVERSATIONS = (
    (
        ("What is the gate code of the Tolvik mill?", "4821"),
        ("Where does the keeper of the Tolvik mill live?", "Halfors"),
        ("When does the Novton museum open now?", "10:45"),
    ),
    (
        ("What does Emil Brimton play?", "trumpet"),
        ("And his sister's?", "piano"),
        ("What is the phone number of the Novton museum?", "the documents do not say"),
    ),
)
"""Questions, and the words that a right answer ends with."""


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
    question: str
    answer: str
    right: bool

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
    client: Any, model: str, to_tokens: Callable[[list[dict[str, str]], str], list[int]], answer_tokens: int = 48
) -> Iterator[Row]:
    """Ask every question, streaming; yields a row per request. The conversations take turns.

    `to_tokens(messages, answer)` gives the server's tokens for a prompt and the answer begun after it.
    """
    seen = _Seen()
    histories = [[{"role": "system", "content": SYSTEM_PROMPT}] for _ in CONVERSATIONS]
    for turn in range(max(map(len, CONVERSATIONS))):
        for conversation, messages in enumerate(histories):
            question, wanted = CONVERSATIONS[conversation][turn]
            messages.append({"role": "user", "content": question})
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
                question,
                answer,
                answer.endswith(f" {wanted}."),
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
