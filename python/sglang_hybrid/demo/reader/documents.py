"""Worlds of facts, and the documents that tell them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from sglang_hybrid.demo.reader import filler, forms, names
from sglang_hybrid.demo.reader.names import TRAIN
from sglang_hybrid.demo.reader.relations import KINDS, Relation

_KIND_WORDS = {"place": names.PLACES, "machine": names.MACHINES, "event": names.EVENTS}


@dataclass(frozen=True, slots=True)
class Entity:
    kind: str
    text: str

    @property
    def possessive(self) -> str:
        if self.kind != "person":
            return "its"
        return "her" if names.is_woman(self.text) else "his"


@dataclass(frozen=True, slots=True)
class Fact:
    """`value` of a relation, told in document number `document`; `before`: the value whose place it takes, or none."""

    entity: Entity
    relation: Relation
    value: str
    document: int
    before: str = ""

    @property
    def changed(self) -> bool:
        return bool(self.before)


Key = tuple[str, str]
"""Entity and noun: what has one value now."""


@dataclass(slots=True)
class World:
    """Documents, in order, as (number, text), and what they say; `facts` keeps the latest value of each key."""

    documents: list[tuple[int, str]] = field(default_factory=list)
    facts: dict[Key, Fact] = field(default_factory=dict)
    entities: dict[str, Entity] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shape:
    """How much a world holds: documents, facts of a document, sentences of filler per fact."""

    documents: int
    facts: tuple[int, int] = (1, 3)
    filler: float = 0.5
    names: str = TRAIN
    forms: str = TRAIN


def entity(rng: random.Random, split: str, kind: str | None = None) -> Entity:
    kind = kind or rng.choice(("place", "place", "person", "person", "machine", "event"))
    if kind == "person":
        return Entity(kind, names.person(rng, split))
    return Entity(kind, f"the {names.name(rng, split)} {rng.choice(_KIND_WORDS[kind])}")


def world(rng: random.Random, shape: Shape) -> World:
    """A world of `shape`; some facts change in a later document, some people are described in another one."""
    made = World()
    first = rng.choice((1, 1, rng.randint(1, max(1, 100 - shape.documents))))
    waiting: list[Entity] = []  # people who were named as a value
    for number in range(first, first + shape.documents):
        told: list[Fact] = []
        count = rng.randint(*shape.facts)
        last = number == first + shape.documents - 1
        while len(told) < count:
            if made.facts and rng.random() < 0.3 and (change := _change(rng, made, number, shape.names)):
                told.append(change)
                continue
            if waiting and (last or rng.random() < 0.6):
                subject = waiting.pop(rng.randrange(len(waiting)))
            else:
                subject = entity(rng, shape.names)
                if rng.random() < 0.2 and (others := [e for e in made.entities.values() if e.kind != "person"]):
                    # One that is easily confused with another.
                    other = rng.choice(others)
                    subject = Entity(
                        other.kind, other.text.rsplit(" ", 1)[0] + " " + rng.choice(_KIND_WORDS[other.kind])
                    )
            made.entities[subject.text] = subject
            for relation in rng.sample(KINDS[subject.kind], rng.randint(1, min(3, max(1, count - len(told))))):
                if (subject.text, relation.noun) in made.facts:
                    continue
                fact = Fact(subject, relation, relation.draw(rng, shape.names), number)
                told.append(fact)
                made.facts[subject.text, relation.noun] = fact
                if relation.person and rng.random() < 0.7:
                    waiting.append(Entity("person", fact.value))
        made.documents.append((number, _tell(rng, told, shape)))
    return made


def _change(rng: random.Random, made: World, number: int, split: str) -> Fact | None:
    old = rng.choice(list(made.facts.values()))
    if old.changed or old.document == number or not old.relation.changes:
        return None
    value = old.relation.draw(rng, split)
    if value == old.value:
        return None
    fact = Fact(old.entity, old.relation, value, number, before=old.value)
    made.facts[old.entity.text, old.relation.noun] = fact
    return fact


def _tell(rng: random.Random, facts: list[Fact], shape: Shape) -> str:
    sentences: list[str] = []
    before: Entity | None = None
    for fact in facts:
        while rng.random() < shape.filler / (1 + shape.filler):
            about = rng.choice(facts).entity.text if rng.random() < 0.3 else None
            sentences.append(filler.sentence(rng, about))
            before = None
        sentences.append(_say(rng, fact, shape.forms, again=fact.entity == before))
        before = fact.entity
    return " ".join(sentences)


def _say(rng: random.Random, fact: Fact, split: str, again: bool) -> str:
    if fact.changed:
        form = forms.changed(rng, split, fact.relation)
    elif again and rng.random() < 0.4:
        form = forms.again(rng, split)
    else:
        form = forms.said(rng, split, fact.relation)
    return fill(form, fact.entity, fact.relation, fact.value)


def fill(form: str, subject: Entity, relation: Relation, value: str = "") -> str:
    """`form` with its slots filled, its first letter a capital."""
    text = form.format(E=subject.text, N=relation.noun, V=value, P=subject.possessive)
    return text[0].upper() + text[1:]
