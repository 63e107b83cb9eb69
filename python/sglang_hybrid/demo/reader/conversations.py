"""Whole conversations over documents, as chat messages and as pieces of text with weights for training."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sglang_hybrid.demo.reader.documents import Shape, World, world
from sglang_hybrid.demo.reader.questions import ABSENT, FOLLOW, HOPS, NOW, ONE, TALK, WHICH, YES_NO, Asker, Turn
from sglang_hybrid.demo.reader.tokens import ASSISTANT, DOCUMENT, END, SYSTEM, TOOL, USER

INSTRUCTIONS = (
    "Answer from the documents.",
    "You read documents and answer questions about them.",
    "Answer in one short sentence. If the documents do not say, say so.",
    "You are a helpful reader. Never guess: the documents say it, or they do not.",
)
MIX = {ONE: 5.0, NOW: 3.0, HOPS: 3.0, WHICH: 1.5, YES_NO: 2.0, ABSENT: 3.0, FOLLOW: 3.0, TALK: 0.6}
"""How often each kind is asked for; a world without one gives another."""

SYSTEM_FIRST, USER_FIRST, TOOL_FIRST = "system", "user", "tool"


@dataclass(slots=True)
class Conversation:
    """Documents and turns; `place` is the message that holds the documents, `separated` whether each is behind a
    separator of its own, as retrieval puts them."""

    world: World
    turns: list[Turn]
    place: str = USER_FIRST
    separated: bool = True
    instruction: str = INSTRUCTIONS[0]

    def documents(self) -> str:
        before = DOCUMENT if self.separated else "\n\n"
        text = "".join(f"{before}Document {number}. {text}" for number, text in self.world.documents)
        return text if self.separated else text[2:]

    def messages(self) -> list[dict[str, str]]:
        """All turns as chat messages, answers included."""
        documents = self.documents()
        place = self.place if documents else ""
        system = f"{self.instruction}\n\n{documents}" if place == SYSTEM_FIRST else self.instruction
        made = [{"role": "system", "content": system}] if system else []
        if place == TOOL_FIRST:
            made.append({"role": "tool", "content": documents})
        for number, turn in enumerate(self.turns):
            question = turn.question
            if place == USER_FIRST and number == 0:
                question = f"{documents}\n\n{question}"
            made += [{"role": "user", "content": question}, {"role": "assistant", "content": turn.text}]
        return made


_MARKS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


def pieces(conversation: Conversation) -> list[tuple[str, int]]:
    """The text of a conversation as the chat template writes it, in pieces (text, part).

    part: -1 for what is read; 0 for what an answer says anyway; 1 for the values in it; 2 for a yes, a no or the number
    of a document, which one token decides.
    """
    made: list[tuple[str, int]] = []
    answers = iter(conversation.turns)
    for message in conversation.messages():
        made.append((_MARKS[message["role"]], -1))
        if message["role"] == "assistant":
            turn = next(answers)
            last = len(turn.answer) - 2
            for number, part in enumerate(turn.answer):
                made.append((part, 2 if number == last and turn.kind in (YES_NO, WHICH) else number % 2))
            made.append((END, 0))
        else:
            made += [(message["content"], -1), (END, -1)]
    return made


def draw(
    rng: random.Random,
    shape: Shape,
    turns: int,
    mix: dict[str, float] | None = None,
    plain: bool = False,
) -> Conversation:
    """A conversation over a world of `shape` with `turns` questions, or fewer where it has nothing left to ask for.

    `plain`: in the standard layout, not in one of several.
    """
    made = world(rng, shape)
    asker = Asker(rng, made, shape.names, shape.forms)
    kinds, weights = zip(*(mix or MIX).items(), strict=True)
    drawn: list[Turn] = []
    misses = 0
    while len(drawn) < turns and misses < 30:
        turn = asker.ask(rng.choices(kinds, weights)[0])
        if turn is not None:
            drawn.append(turn)
        misses += turn is None
    if plain:
        return Conversation(made, drawn)
    return Conversation(
        made,
        drawn,
        place=rng.choice((USER_FIRST, USER_FIRST, SYSTEM_FIRST, TOOL_FIRST)),
        separated=rng.random() < 0.6,
        instruction=rng.choice(("", *INSTRUCTIONS)) if rng.random() < 0.7 else INSTRUCTIONS[0],
    )


MOST_DOCUMENTS = 60
"""Of a conversation; a longer one has longer documents."""


def shape_for(
    rng: random.Random,
    tokens: int,
    share: float,
    filler_level: float,
    split: str,
    form: str,
    documents: int | None = None,
) -> Shape:
    """A shape whose documents, `documents` of them or as many as usual, take about `share` of `tokens`."""
    if not share:
        return Shape(0, (1, 1), filler_level, split, form)
    of_fact, of_document = 16 + filler_level * 11, 5
    if documents:
        facts = max(1, round((tokens * share / documents - of_document) / of_fact))
        return Shape(documents, (facts, facts), filler_level, split, form)
    low, high = (1, 2) if tokens < 200 else (1, 4)
    documents = max(1, round(tokens * share / ((low + high) / 2 * of_fact + of_document)))
    if documents > 20 and rng.random() < 0.7:
        factor = rng.choice((2, 3))
        documents, low, high = documents // factor, low * factor, high * factor
    if documents > MOST_DOCUMENTS:
        factor = -(-documents // MOST_DOCUMENTS)
        documents, low, high = documents // factor, low * factor, high * factor
    return Shape(documents, (low, high), filler_level, split, form)
