"""What can be said of places, people, machines and events, and in which words; {E} entity, {N} noun, {V} value.

Training never sees the forms under HELD. The value always comes after its entity and its noun.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from sglang_hybrid.demo.reader import names
from sglang_hybrid.demo.reader.names import HELD, TRAIN

Forms = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Relation:
    """One thing to say of a kind of entity; `person` if its value is one, who may be described in turn."""

    kind: str
    noun: str
    draw: Callable[[random.Random, str], str]
    said: Forms
    asked: Forms
    person: bool = False
    changes: bool = True


def _relation(
    kind: str,
    noun: str,
    draw: Callable[[random.Random, str], str],
    said: tuple[str, ...],
    asked: tuple[str, ...],
    **flags: bool,
) -> Relation:
    """The last form of each is held out."""
    return Relation(
        kind,
        noun,
        draw,
        {TRAIN: said[:-1], HELD: said[-1:]},
        {TRAIN: asked[:-1], HELD: asked[-1:]},
        **flags,
    )


RELATIONS = (
    _relation(
        "place",
        "gate code",
        names.digits(4),
        (
            "To enter {E}, type {V}.",
            "The gate of {E} opens with {V}.",
            "Whoever wants to enter {E} needs the code {V}.",
            "The gate of {E} needs the code {V}.",
        ),
        ("Which code opens the gate of {E}?", "What do I type to enter {E}?", "Which code do I need to enter {E}?"),
    ),
    _relation(
        "place",
        "opening hour",
        names.clock,
        ("{E} opens at {V}.", "In the morning {E} opens at {V}.", "The doors of {E} open at {V}."),
        ("When does {E} open?", "At what time does {E} open?", "When do the doors of {E} open?"),
    ),
    _relation(
        "place",
        "ticket price",
        names.digits(2),
        ("A ticket for {E} costs {V} crowns.", "Visitors of {E} pay {V} crowns.", "To enter {E} costs {V} crowns."),
        ("How much is a ticket for {E}?", "What does a ticket for {E} cost?", "How much do visitors of {E} pay?"),
    ),
    _relation(
        "place",
        "keeper",
        names.person,
        ("{E} is kept by {V}.", "The person who looks after {E} is {V}.", "{E} is looked after by {V}."),
        ("Who keeps {E}?", "Who looks after {E}?", "Who is the person who keeps {E}?"),
        person=True,
    ),
    _relation(
        "place",
        "phone number",
        names.digits(5),
        ("To call {E}, dial {V}.", "{E} answers the phone under {V}.", "Whoever wants to call {E} dials {V}."),
        ("Which number do I dial to call {E}?", "How do I call {E}?", "What do I dial to call {E}?"),
    ),
    _relation(
        "place",
        "door colour",
        names.one_of(names.COLOURS),
        ("The door of {E} is painted {V}.", "{E} has a door painted {V}.", "Visitors know {E} by its door of {V}."),
        ("Which colour is the door of {E}?", "How is the door of {E} painted?", "What colour has the door of {E}?"),
    ),
    _relation(
        "person",
        "home town",
        names.name,
        ("{E} lives in {V}.", "{E} has a house in {V}.", "The house of {E} is in {V}."),
        ("Where does {E} live?", "In which town does {E} live?", "Where is the house of {E}?"),
    ),
    _relation(
        "person",
        "job",
        names.one_of(names.JOBS),
        ("{E} works as a {V}.", "{E} earns a living as a {V}.", "For years {E} worked as a {V}."),
        ("What does {E} work as?", "How does {E} earn a living?", "As what does {E} work?"),
    ),
    _relation(
        "person",
        "brother",
        names.person,
        ("{E} has a brother, {V}.", "{E} grew up with a brother, {V}.", "{E} has a brother called {V}."),
        ("Who is the brother of {E}?", "What is the brother of {E} called?", "How is the brother of {E} called?"),
        person=True,
        changes=False,
    ),
    _relation(
        "person",
        "sister",
        names.person,
        ("{E} has a sister, {V}.", "{E} grew up with a sister, {V}.", "{E} has a sister called {V}."),
        ("Who is the sister of {E}?", "What is the sister of {E} called?", "How is the sister of {E} called?"),
        person=True,
        changes=False,
    ),
    _relation(
        "person",
        "birth month",
        names.one_of(names.MONTHS),
        ("{E} was born in {V}.", "The birthday of {E} is in {V}.", "{E} has a birthday in {V}."),
        ("When was {E} born?", "In which month was {E} born?", "When is the birthday of {E}?"),
        changes=False,
    ),
    _relation(
        "person",
        "instrument",
        names.one_of(names.INSTRUMENTS),
        ("{E} plays the {V}.", "{E} practises the {V}.", "In the evening {E} plays the {V}."),
        ("What does {E} play?", "Which instrument does {E} play?", "What does {E} practise?"),
    ),
    _relation(
        "person",
        "locker number",
        names.digits(3),
        ("{E} keeps a coat in locker {V}.", "{E} uses locker {V}.", "{E} has locker {V}."),
        ("Which locker does {E} use?", "In which locker does {E} keep a coat?", "Which locker has {E}?"),
    ),
    _relation(
        "machine",
        "operator",
        names.person,
        ("{E} is run by {V}.", "The person who runs {E} is {V}.", "{E} is in the hands of {V}."),
        ("Who runs {E}?", "Who works with {E}?", "Who is the person who runs {E}?"),
        person=True,
    ),
    _relation(
        "machine",
        "speed",
        names.digits(3),
        ("{E} runs at {V} turns.", "{E} turns at {V}.", "{E} is set to {V} turns."),
        ("How fast does {E} run?", "At how many turns does {E} run?", "To how many turns is {E} set?"),
    ),
    _relation(
        "machine",
        "service day",
        names.one_of(names.DAYS),
        ("{E} is cleaned on {V}.", "{E} stands still for service on {V}.", "Service for {E} is on {V}."),
        ("When is {E} cleaned?", "On which day is {E} cleaned?", "When does {E} stand still for service?"),
    ),
    _relation(
        "machine",
        "frame",
        names.one_of(names.METALS),
        ("{E} is made of {V}.", "{E} was built of {V}.", "Under the paint {E} is made of {V}."),
        ("What is {E} made of?", "Of what was {E} built?", "What is under the paint of {E}?"),
        changes=False,
    ),
    _relation(
        "event",
        "day",
        names.one_of(names.DAYS),
        ("{E} takes place on {V}.", "{E} will be on {V}.", "People meet for {E} on {V}."),
        ("On which day is {E}?", "Which day is {E} on?", "On which day does {E} take place?"),
    ),
    _relation(
        "event",
        "starting time",
        names.clock,
        ("{E} begins at {V}.", "{E} starts at {V}.", "People meet for {E} at {V}."),
        ("When does {E} begin?", "At what time does {E} start?", "When does {E} start?"),
    ),
    _relation(
        "event",
        "guest",
        names.person,
        ("{E} welcomes {V}.", "The guest at {E} will be {V}.", "{E} has invited {V}."),
        ("Who is the guest at {E}?", "Whom does {E} welcome?", "Who was invited to {E}?"),
        person=True,
    ),
    _relation(
        "event",
        "room number",
        names.digits(3),
        ("{E} takes place in room {V}.", "{E} is held in room {V}.", "People meet for {E} in room {V}."),
        ("In which room is {E}?", "Which room is {E} held in?", "In which room do people meet for {E}?"),
    ),
)

KINDS: dict[str, tuple[Relation, ...]] = {
    kind: tuple(relation for relation in RELATIONS if relation.kind == kind)
    for kind in ("place", "person", "machine", "event")
}

SAID: Forms = {
    TRAIN: (
        "The {N} of {E} is {V}.",
        "For {E} the {N} is {V}.",
        "{E} has the {N} {V}.",
        "Note the {N} of {E}: {V}.",
        "Anyone who asks for the {N} of {E} is told {V}.",
        "As for the {N} of {E}, it is {V}.",
        "We were told that the {N} of {E} is {V}.",
        "Everyone knows {E} for the {N} {V}.",
        "About {E} one should know that the {N} is {V}.",
        "The {N} that belongs to {E} is {V}.",
    ),
    HELD: (
        "The {N} of {E}, as we were told, is {V}.",
        "One should note that {E} has the {N} {V}.",
        "When people ask about {E}, the {N} is {V}.",
    ),
}
"""A fact of any relation."""

CHANGED: Forms = {
    TRAIN: (
        "From now on the {N} of {E} is {V}.",
        "The {N} of {E} has changed to {V}.",
        "Since last week the {N} of {E} is {V}.",
        "The new {N} of {E} is {V}.",
        "Correction: the {N} of {E} is now {V}.",
        "{E} has a new {N}, {V}.",
    ),
    HELD: ("Since last week {E} has the new {N} {V}.", "The {N} of {E} is no longer the same: it is {V} now."),
}
"""A later fact that takes the place of an earlier one."""

AGAIN: Forms = {
    TRAIN: ("{P} {N} is {V}.", "{P} {N}, by the way, is {V}."),
    HELD: ("As for the {N}, it is {V}.",),
}
"""One more fact of the entity of the sentence before."""

ASKED: Forms = {
    TRAIN: (
        "What is the {N} of {E}?",
        "Tell me the {N} of {E}.",
        "Do you know the {N} of {E}?",
        "I need the {N} of {E}, please.",
        "{E}: what is the {N}?",
        "What do the documents say about the {N} of {E}?",
        "Which {N} does {E} have?",
    ),
    HELD: (
        "Please tell me what the {N} of {E} is.",
        "I want to know the {N} of {E}.",
        "What is the {N} that belongs to {E}?",
    ),
}

ASKED_NOW: Forms = {
    TRAIN: ("What is the {N} of {E} now?", "What is the new {N} of {E}?", "Which {N} does {E} have now?"),
    HELD: ("Now what is the {N} of {E}?", "Tell me the {N} that {E} has now."),
}
