"""Held-out questions as token ids: what a client sends for each turn, and what a right answer is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_hybrid.demo.reader import card, evaluation
from sglang_hybrid.demo.reader.conversations import Conversation
from sglang_hybrid.demo.reader.examples import encode
from sglang_hybrid.demo.reader.names import HELD

Counts = dict[str, list[int]]
"""Right answers and questions by kind."""


@dataclass(frozen=True, slots=True)
class Question:
    """`prompt`: the conversation so far, with right answers to what was asked before; `answer` with its stop token."""

    kind: str
    prompt: list[int]
    answer: list[int]


def asked(length: int, count: int, documents: int | None = None) -> list[Question]:
    """The turns, in order, of conversations of about `length` tokens, at least `count` of each kind."""
    return [turn for made in evaluation.drawn(length, HELD, count, documents) for turn in turns(made)]


def turns(conversation: Conversation) -> list[Question]:
    encoded = encode(conversation)
    return [Question(turn.kind, encoded.ids[:start], encoded.ids[start:end]) for turn, start, end in encoded.answers]


def counted(questions: Iterable[Question], answers: Iterable[list[int]]) -> Counts:
    counts: Counts = {}
    for question, answer in zip(questions, answers, strict=True):
        row = counts.setdefault(question.kind, [0, 0])
        row[0] += answer == question.answer
        row[1] += 1
    return counts


def rows(counts: Counts) -> list[dict[str, object]]:
    """Shares and Wilson's intervals by kind, and of all."""
    return list(card.evaluated(0, HELD, counts)["rows"])
