"""Questions about a world and their answers, by kind.

An answer repeats what it is about before it says it, so that each value is looked up behind its own name.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from sglang_hybrid.demo.reader import forms, talk
from sglang_hybrid.demo.reader.documents import Entity, Fact, World, entity, fill
from sglang_hybrid.demo.reader.relations import KINDS, Relation

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


def through(first: Fact, rest: tuple[str, ...]) -> tuple[str, ...]:
    """The answer that goes through a person; `rest`: the answer about that person."""
    start, person, _ = answered(first.entity, first.relation, first.value)
    return (start, person, ", and t" + rest[0][1:], *rest[1:])


class Asker:
    """Draws questions about one world; a key is asked for once while there are others, or an answer gives it away."""

    def __init__(self, rng: random.Random, world: World, split: str, form: str) -> None:
        self.rng, self.world, self.split, self.form = rng, world, split, form
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
            question, answer = talk.turn(self.rng, self.form)
            return Turn(TALK, question, (answer,))
        if kind == ABSENT:
            return self._absent_behind_a_person() if self.rng.random() < 0.15 else self._absent()
        if kind == FOLLOW:
            return self._follow()
        if kind == HOPS:
            return self._hops()
        fact = self._fact(kind)
        if fact is None:
            return None
        self._spend(fact)
        subject, relation = fact.entity, fact.relation
        if kind == WHICH:
            question = fill(forms.which(self.rng, self.form, relation), subject, relation)
            start = fill("The {N} of {E} is in document", subject, relation)
            return Turn(kind, question, (start, f" {fact.document}", "."), subject, relation)
        if kind == YES_NO:
            asked = fact.value if self.rng.random() < 0.5 else self._other(fact)
            question = fill(forms.confirmed(self.rng, self.form, relation), subject, relation, asked)
            parts = answered(subject, relation, fact.value)[:2]
            end = (", so", " yes" if asked == fact.value else " no", ".")
            return Turn(kind, question, (*parts, *end), subject, relation)
        now = self.rng.random() < (0.6 if kind == NOW else 0.05)
        question = fill(forms.asked(self.rng, self.form, relation, now), subject, relation)
        return Turn(kind, question, answered(subject, relation, fact.value), subject, relation)

    def _spend(self, *facts: Fact) -> None:
        self.asked |= {(fact.entity.text, fact.relation.noun) for fact in facts}

    def _fact(self, kind: str) -> Fact | None:
        found = [
            fact
            for key, fact in self.world.facts.items()
            if key not in self.asked and (kind in (YES_NO, WHICH) or fact.changed == (kind == NOW))
        ]
        return self.rng.choice(found) if found else None

    def _other(self, fact: Fact) -> str:
        """Another value of the relation: the one before, one from the documents, or any."""
        if fact.before and self.rng.random() < 0.5:
            return fact.before
        same = [f.value for f in self.world.facts.values() if f.relation == fact.relation and f.value != fact.value]
        if same and self.rng.random() < 0.6:
            return self.rng.choice(same)
        while (value := fact.relation.draw(self.rng, self.split)) == fact.value:
            pass
        return value

    def _missing(self, subject: Entity) -> Relation | None:
        missing = [r for r in KINDS[subject.kind] if (subject.text, r.noun) not in self.world.facts]
        return self.rng.choice(missing) if missing else None

    def _absent(self) -> Turn | None:
        known = list(self.world.entities.values())
        subject = self.rng.choice(known) if known and self.rng.random() < 0.6 else entity(self.rng, self.split)
        relation = self._missing(subject)
        if relation is None:
            return None
        now = self.rng.random() < 0.05
        question = fill(forms.asked(self.rng, self.form, relation, now), subject, relation)
        return Turn(ABSENT, question, unknown(subject, relation), subject, relation)

    def _people(self) -> list[tuple[Fact, Entity]]:
        return [(f, Entity("person", f.value)) for f in self.world.facts.values() if f.relation.person]

    def _absent_behind_a_person(self) -> Turn | None:
        """The person is known, what is asked of that person is not."""
        people = self._people()
        if not people:
            return None
        first, person = self.rng.choice(people)
        relation = self._missing(person)
        if relation is None:
            return None
        self._spend(first)
        answer = through(first, unknown(person, relation))
        return Turn(ABSENT, self._question_through(first, relation), answer, person, None)

    def _question_through(self, first: Fact, second: Relation) -> str:
        form = forms.asked(self.rng, self.form, second).replace("{N}", second.noun)
        form = form.replace("{E}", forms.through(self.rng, first.relation))
        return fill(form, first.entity, first.relation)

    def _hops(self) -> Turn | None:
        facts = self.world.facts
        found = [
            (first, second)
            for first, person in self._people()
            for relation in KINDS["person"]
            if (second := facts.get((person.text, relation.noun))) is not None
            and (person.text, relation.noun) not in self.asked
            and first.document != second.document
        ]
        if not found:
            return None
        first, second = self.rng.choice(found)
        self._spend(first, second)
        question = self._question_through(first, second.relation)
        return Turn(HOPS, question, self._answer_through(first, second), second.entity, None)

    def _answer_through(self, first: Fact, second: Fact) -> tuple[str, ...]:
        return through(first, answered(second.entity, second.relation, second.value))

    def _follow(self) -> Turn | None:
        """A question that is only understood from the one before."""
        before = self.before
        if before is None or before.entity is None or before.relation is None:
            return None
        facts, subject = self.world.facts, before.entity
        own = subject.possessive
        family = [
            (first, second)
            for noun in ("brother", "sister")
            if (first := facts.get((subject.text, noun))) is not None
            if (second := facts.get((first.value, before.relation.noun))) is not None
        ]
        if family and self.rng.random() < 0.6:
            first, second = self.rng.choice(family)
            form = forms.followed(self.rng, self.form, forms.FAMILY)
            question = fill(form.replace("{R}", first.relation.noun).replace("{p}", own), subject, first.relation)
            return Turn(FOLLOW, question, self._answer_through(first, second), subject, before.relation)
        if self.rng.random() < 0.1 and (relation := self._missing(subject)):
            form = forms.followed(self.rng, self.form, forms.SAME_ENTITY).replace("{p}", own)
            return Turn(FOLLOW, fill(form, subject, relation), unknown(subject, relation), subject, relation)
        choices = [
            fact
            for key, fact in facts.items()
            if key not in self.asked and (fact.entity == subject) != (fact.relation == before.relation)
        ]
        if not choices:
            return None
        fact = self.rng.choice(choices)
        self._spend(fact)
        same = forms.SAME_ENTITY if fact.entity == subject else forms.SAME_RELATION
        form = forms.followed(self.rng, self.form, same).replace("{p}", own)
        question = fill(form, fact.entity, fact.relation)
        return Turn(FOLLOW, question, answered(fact.entity, fact.relation, fact.value), fact.entity, fact.relation)
