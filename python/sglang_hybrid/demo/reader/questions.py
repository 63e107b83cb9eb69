"""Questions about a world and their answers, by kind.

An answer repeats what it is about before it says it, so that each value is looked up behind its own name.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from sglang_hybrid.demo.reader import names
from sglang_hybrid.demo.reader.documents import Entity, Fact, World, entity, fill
from sglang_hybrid.demo.reader.relations import ASKED, ASKED_NOW, KINDS, Forms, Relation

ONE, NOW, HOPS, WHICH, YES_NO, ABSENT, FOLLOW, TALK = (
    "one fact",
    "changed fact",
    "two hops",
    "which document",
    "yes or no",
    "not in the documents",
    "follow-up",
    "small talk",
)
ALL = (ONE, NOW, HOPS, WHICH, YES_NO, ABSENT, FOLLOW, TALK)


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, the parts of its answer (those that hold what was asked for at odd places), what it was about."""

    kind: str
    question: str
    answer: tuple[str, ...]
    entity: Entity | None = None
    relation: Relation | None = None

    @property
    def text(self) -> str:
        return "".join(self.answer)


def answered(subject: Entity, relation: Relation, value: str) -> tuple[str, ...]:
    return (fill("The {N} of {E} is", subject, relation), f" {value}", ".")


def unknown(subject: Entity, relation: Relation) -> tuple[str, ...]:
    return (fill("The {N} of {E} is", subject, relation), " not given", ": the documents do not say.")


WHICH_FORMS: Forms = {
    names.TRAIN: (
        "Which document gives the {N} of {E}?",
        "In which document is the {N} of {E}?",
        "Where do the documents say what the {N} of {E} is?",
    ),
    names.HELD: ("Which of the documents has the {N} of {E}?",),
}
YES_NO_FORMS: Forms = {
    names.TRAIN: ("Is {V} the {N} of {E}?", "Is the {N} of {E} {V}?", "Is it true that the {N} of {E} is {V}?"),
    names.HELD: ("The {N} of {E} is {V}, is it not?",),
}
HOPS_FORMS: Forms = {
    names.TRAIN: (
        "What is the {M} of the {N} of {E}?",
        "Tell me the {M} of the {N} of {E}.",
        "Which {M} does the {N} of {E} have?",
        "The {N} of {E}: what {M} is that?",
    ),
    names.HELD: ("I want to know the {M} of the {N} of {E}.",),
}
SAME_ENTITY: Forms = {
    names.TRAIN: ("And the {N}?", "And {p} {N}?", "What about the {N}?"),
    names.HELD: ("What about {p} {N}?",),
}
SAME_RELATION: Forms = {
    names.TRAIN: ("And of {E}?", "What about {E}?", "And {E}?"),
    names.HELD: ("And what about {E}?",),
}

_CAN = "I read documents and answer questions about them."
_TALK: dict[str, tuple[tuple[str, str], ...]] = {
    names.TRAIN: (
        ("Hello!", "Hello! Ask me about the documents."),
        ("Hi.", "Hello! Ask me about the documents."),
        ("Good morning.", "Hello! Ask me about the documents."),
        ("Hello there.", "Hello! Ask me about the documents."),
        ("Thanks.", "You are welcome."),
        ("Thank you very much.", "You are welcome."),
        ("Thanks, that helps.", "You are welcome."),
        ("What can you do?", _CAN),
        ("Who are you?", _CAN),
        ("What are you?", _CAN),
        ("Can you help me?", _CAN),
        ("Goodbye.", "Goodbye!"),
        ("Bye.", "Goodbye!"),
        ("What is the weather today?", "The documents do not say."),
        ("Tell me a story.", "The documents do not say."),
        ("Who wrote this?", "The documents do not say."),
        ("Wie geht es dir?", "The documents do not say."),
        ("Quelle heure est-il?", "The documents do not say."),
        ("Hola, que tal?", "The documents do not say."),
        ("42?", "The documents do not say."),
    ),
    names.HELD: (
        ("Hello, good morning!", "Hello! Ask me about the documents."),
        ("Thanks, thank you.", "You are welcome."),
        ("What can you do, please?", _CAN),
        ("Bye, and thanks.", "Goodbye!"),
        ("Wo ist der Bahnhof?", "The documents do not say."),
    ),
}


class Asker:
    """Draws questions about one world; a key is asked for once while there are others, or an answer gives it away."""

    def __init__(self, rng: random.Random, world: World, split: str, forms: str) -> None:
        self.rng, self.world, self.split, self.forms = rng, world, split, forms
        self.asked: set[tuple[str, str]] = set()
        self.before: Turn | None = None

    def ask(self, kind: str) -> Turn | None:
        """A question of `kind`, or None where this world has none (left)."""
        turn = self._make(kind)
        if turn is not None:
            self.before = turn if turn.entity is not None else None
        return turn

    def _make(self, kind: str) -> Turn | None:
        if kind == TALK:
            question, answer = self.rng.choice(_TALK[self.forms])
            return Turn(TALK, question, (answer,))
        if kind == ABSENT:
            return self._absent()
        if kind == FOLLOW:
            return self._follow()
        if kind == HOPS:
            return self._hops()
        fact = self._fact(kind)
        if fact is None:
            return None
        self.asked.add((fact.entity.text, fact.relation.noun))
        subject, relation = fact.entity, fact.relation
        if kind == WHICH:
            form = self.rng.choice(WHICH_FORMS[self.forms])
            start = fill("The {N} of {E} is in document", subject, relation)
            return Turn(kind, fill(form, subject, relation), (start, f" {fact.document}", "."), subject, relation)
        if kind == YES_NO:
            truth = self.rng.random() < 0.5
            asked = fact.value if truth else self._other(fact)
            form = self.rng.choice(YES_NO_FORMS[self.forms])
            parts = answered(subject, relation, fact.value)[:2]
            end = (", so", " yes" if asked == fact.value else " no", ".")
            return Turn(kind, fill(form, subject, relation, asked), (*parts, *end), subject, relation)
        return Turn(kind, self._question(fact), answered(subject, relation, fact.value), subject, relation)

    def _fact(self, kind: str) -> Fact | None:
        found = [
            fact
            for key, fact in self.world.facts.items()
            if key not in self.asked and (kind == YES_NO or fact.changed == (kind == NOW))
        ]
        return self.rng.choice(found) if found else None

    def _question(self, fact: Fact) -> str:
        if fact.changed and self.rng.random() < 0.5:
            form = self.rng.choice(ASKED_NOW[self.forms])
        elif self.rng.random() < 0.5:
            form = self.rng.choice(fact.relation.asked[self.forms])
        else:
            form = self.rng.choice(ASKED[self.forms])
        return fill(form, fact.entity, fact.relation)

    def _other(self, fact: Fact) -> str:
        """Another value of the relation, from the documents if there is one."""
        same = [f.value for f in self.world.facts.values() if f.relation == fact.relation and f.value != fact.value]
        if same and self.rng.random() < 0.6:
            return self.rng.choice(same)
        return fact.relation.draw(self.rng, self.split)

    def _absent(self) -> Turn | None:
        known = list(self.world.entities.values())
        subject = self.rng.choice(known) if known and self.rng.random() < 0.6 else entity(self.rng, self.split)
        missing = [r for r in KINDS[subject.kind] if (subject.text, r.noun) not in self.world.facts]
        if not missing:
            return None
        relation = self.rng.choice(missing)
        form = self.rng.choice(relation.asked[self.forms] if self.rng.random() < 0.5 else ASKED[self.forms])
        return Turn(ABSENT, fill(form, subject, relation), unknown(subject, relation), subject, relation)

    def _hops(self) -> Turn | None:
        found = [
            (first, second)
            for first in self.world.facts.values()
            if first.relation.person
            for second in self.world.facts.values()
            if second.entity.text == first.value
            and (second.entity.text, second.relation.noun) not in self.asked
            and first.document != second.document
        ]
        if not found:
            return None
        first, second = self.rng.choice(found)
        self.asked |= {(f.entity.text, f.relation.noun) for f in (first, second)}
        form = self.rng.choice(HOPS_FORMS[self.forms]).replace("{M}", second.relation.noun)
        return Turn(HOPS, fill(form, first.entity, first.relation), through(first, second), second.entity, None)

    def _follow(self) -> Turn | None:
        """A question that is only understood from the one before."""
        before = self.before
        if before is None or before.entity is None or before.relation is None:
            return None
        facts = self.world.facts
        family = [
            (first, second)
            for first in facts.values()
            if first.entity == before.entity and first.relation.noun in ("brother", "sister")
            if (second := facts.get((first.value, before.relation.noun))) is not None
        ]
        if family and self.rng.random() < 0.6:
            first, second = self.rng.choice(family)
            question = f"And {before.entity.possessive.lower()} {first.relation.noun}'s?"
            return Turn(FOLLOW, question, through(first, second), before.entity, before.relation)
        choices = [
            fact
            for key, fact in facts.items()
            if key not in self.asked and (fact.entity == before.entity) != (fact.relation == before.relation)
        ]
        if not choices:
            return None
        fact = self.rng.choice(choices)
        self.asked.add((fact.entity.text, fact.relation.noun))
        same = SAME_ENTITY if fact.entity == before.entity else SAME_RELATION
        form = self.rng.choice(same[self.forms]).replace("{p}", fact.entity.possessive.lower())
        question = fill(form, fact.entity, fact.relation)
        return Turn(FOLLOW, question, answered(fact.entity, fact.relation, fact.value), fact.entity, fact.relation)


def through(first: Fact, second: Fact) -> tuple[str, ...]:
    """The answer that goes through a person."""
    start, person, _ = answered(first.entity, first.relation, first.value)
    middle = f", and the {second.relation.noun} of{person} is"
    return (start, person, middle, f" {second.value}", ".")
