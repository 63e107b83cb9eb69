"""What can be said of places, people, machines and events, and in which clauses.

{E}: the entity, {N}: the noun of the relation, {V}: its value. A clause has no capital and no full stop: `forms` puts
it into sentences and questions. A value always comes after its entity, so that a reader that goes from left to right
knows what it is of.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from sglang_hybrid.demo.reader import names

Wh = tuple[str, str]
"""A question as it stands alone ("when does it open") and inside another one ("when it opens")."""


@dataclass(frozen=True, slots=True)
class Relation:
    """One thing to say of a kind of entity; `person` if its value is one, who may be described in turn; `changes` if a
    later document may say otherwise."""

    kind: str
    noun: str
    draw: Callable[[random.Random, str], str]
    said: tuple[str, ...]
    asked: tuple[Wh, ...]
    person: bool = False
    changes: bool = True


def _both(clause: str) -> Wh:
    """A question whose subject is the question word: the same in both places."""
    return clause, clause


RELATIONS = (
    Relation(
        "place",
        "gate code",
        names.digits(4),
        (
            "the gate of {E} opens with {V}",
            "the gate of {E} needs the code {V}",
            "to enter {E} people type {V}",
            "whoever enters {E} types {V}",
        ),
        (
            _both("which code opens the gate of {E}"),
            ("which code does the gate of {E} need", "which code the gate of {E} needs"),
            ("what do people type to enter {E}", "what people type to enter {E}"),
        ),
    ),
    Relation(
        "place",
        "opening hour",
        names.clock,
        (
            "{E} opens at {V}",
            "the doors of {E} open at {V}",
            "{E} lets people in at {V}",
            "visitors of {E} may come at {V}",
        ),
        (
            ("when does {E} open", "when {E} opens"),
            ("at what time do the doors of {E} open", "at what time the doors of {E} open"),
            ("when may visitors of {E} come", "when visitors of {E} may come"),
        ),
    ),
    Relation(
        "place",
        "ticket price",
        names.digits(2),
        (
            "a ticket for {E} costs {V} crowns",
            "visitors of {E} pay {V} crowns",
            "to enter {E} costs {V} crowns",
            "whoever visits {E} pays {V} crowns",
        ),
        (
            ("how much does a ticket for {E} cost", "how much a ticket for {E} costs"),
            ("what do visitors of {E} pay", "what visitors of {E} pay"),
            ("how many crowns does it cost to enter {E}", "how many crowns it costs to enter {E}"),
        ),
    ),
    Relation(
        "place",
        "keeper",
        names.person,
        (
            "{E} is kept by {V}",
            "{E} is looked after by {V}",
            "the one who looks after {E} is {V}",
            "{E} has long been in the care of {V}",
        ),
        (
            _both("who keeps {E}"),
            _both("who looks after {E}"),
            ("in whose care is {E}", "in whose care {E} is"),
        ),
        person=True,
    ),
    Relation(
        "place",
        "phone number",
        names.digits(5),
        (
            "to call {E} people dial {V}",
            "{E} answers the phone under {V}",
            "whoever calls {E} dials {V}",
            "the phone of {E} rings under {V}",
        ),
        (
            ("what do people dial to call {E}", "what people dial to call {E}"),
            ("under which number does {E} answer the phone", "under which number {E} answers the phone"),
            ("under which number does the phone of {E} ring", "under which number the phone of {E} rings"),
        ),
    ),
    Relation(
        "place",
        "door colour",
        names.one_of(names.COLOURS),
        (
            "the door of {E} is painted {V}",
            "{E} has a door painted {V}",
            "visitors know {E} by its door of {V}",
            "the door of {E} shines in {V}",
        ),
        (
            ("which colour is the door of {E}", "which colour the door of {E} is"),
            ("how is the door of {E} painted", "how the door of {E} is painted"),
            ("in which colour does the door of {E} shine", "in which colour the door of {E} shines"),
        ),
    ),
    Relation(
        "person",
        "home town",
        names.name,
        ("{E} lives in {V}", "{E} has a house in {V}", "the house of {E} is in {V}", "{E} has settled in {V}"),
        (
            ("where does {E} live", "where {E} lives"),
            ("in which town does {E} have a house", "in which town {E} has a house"),
            ("where has {E} settled", "where {E} has settled"),
        ),
    ),
    Relation(
        "person",
        "job",
        names.one_of(names.JOBS),
        (
            "{E} works as a {V}",
            "{E} earns a living as a {V}",
            "for years {E} has worked as a {V}",
            "{E} was trained as a {V}",
        ),
        (
            ("what does {E} work as", "what {E} works as"),
            ("how does {E} earn a living", "how {E} earns a living"),
            ("as what was {E} trained", "as what {E} was trained"),
        ),
    ),
    Relation(
        "person",
        "brother",
        names.man,
        (
            "{E} has a brother called {V}",
            "{E} grew up with a brother, {V}",
            "{E} often visits a brother, {V}",
            "{E} writes letters to a brother, {V}",
        ),
        (
            _both("who is the brother of {E}"),
            ("what is the brother of {E} called", "what the brother of {E} is called"),
            ("which brother does {E} visit", "which brother {E} visits"),
        ),
        person=True,
        changes=False,
    ),
    Relation(
        "person",
        "sister",
        names.woman,
        (
            "{E} has a sister called {V}",
            "{E} grew up with a sister, {V}",
            "{E} often visits a sister, {V}",
            "{E} writes letters to a sister, {V}",
        ),
        (
            _both("who is the sister of {E}"),
            ("what is the sister of {E} called", "what the sister of {E} is called"),
            ("which sister does {E} visit", "which sister {E} visits"),
        ),
        person=True,
        changes=False,
    ),
    Relation(
        "person",
        "birth month",
        names.one_of(names.MONTHS),
        (
            "{E} was born in {V}",
            "the birthday of {E} is in {V}",
            "{E} has a birthday in {V}",
            "the friends of {E} bring a cake in {V}",
        ),
        (
            ("when was {E} born", "when {E} was born"),
            ("in which month is the birthday of {E}", "in which month the birthday of {E} is"),
            ("when do the friends of {E} bring a cake", "when the friends of {E} bring a cake"),
        ),
        changes=False,
    ),
    Relation(
        "person",
        "instrument",
        names.one_of(names.INSTRUMENTS),
        (
            "{E} plays the {V}",
            "{E} practises the {V}",
            "{E} has learned to play the {V}",
            "the neighbours of {E} hear the {V}",
        ),
        (
            ("what does {E} play", "what {E} plays"),
            ("which instrument does {E} practise", "which instrument {E} practises"),
            ("what do the neighbours of {E} hear", "what the neighbours of {E} hear"),
        ),
    ),
    Relation(
        "person",
        "locker number",
        names.digits(3),
        (
            "{E} uses locker {V}",
            "{E} has locker {V}",
            "{E} keeps a coat in locker {V}",
            "the coat of {E} hangs in locker {V}",
        ),
        (
            ("which locker does {E} use", "which locker {E} uses"),
            ("in which locker does {E} keep a coat", "in which locker {E} keeps a coat"),
            ("in which locker does the coat of {E} hang", "in which locker the coat of {E} hangs"),
        ),
    ),
    Relation(
        "machine",
        "operator",
        names.person,
        (
            "{E} is run by {V}",
            "the one who runs {E} is {V}",
            "{E} is in the hands of {V}",
            "nobody but one may touch {E}: {V}",
        ),
        (
            _both("who runs {E}"),
            _both("who may touch {E}"),
            ("in whose hands is {E}", "in whose hands {E} is"),
        ),
        person=True,
    ),
    Relation(
        "machine",
        "speed",
        names.digits(3),
        ("{E} runs at {V} turns", "{E} turns at {V}", "{E} is set to {V} turns", "the wheel of {E} makes {V} turns"),
        (
            ("how fast does {E} run", "how fast {E} runs"),
            ("to how many turns is {E} set", "to how many turns {E} is set"),
            ("how many turns does the wheel of {E} make", "how many turns the wheel of {E} makes"),
        ),
    ),
    Relation(
        "machine",
        "service day",
        names.one_of(names.DAYS),
        (
            "{E} is cleaned on {V}",
            "{E} stands still for service on {V}",
            "service for {E} is on {V}",
            "somebody comes to oil {E} on {V}",
        ),
        (
            ("when is {E} cleaned", "when {E} is cleaned"),
            ("on which day does {E} stand still for service", "on which day {E} stands still for service"),
            ("when does somebody come to oil {E}", "when somebody comes to oil {E}"),
        ),
    ),
    Relation(
        "machine",
        "frame",
        names.one_of(names.METALS),
        (
            "{E} is made of {V}",
            "{E} was built of {V}",
            "under its paint {E} is made of {V}",
            "{E} stands on feet of {V}",
        ),
        (
            ("what is {E} made of", "what {E} is made of"),
            ("of what was {E} built", "of what {E} was built"),
            ("on feet of what does {E} stand", "on feet of what {E} stands"),
        ),
        changes=False,
    ),
    Relation(
        "event",
        "day",
        names.one_of(names.DAYS),
        (
            "{E} takes place on {V}",
            "{E} will be held on {V}",
            "people meet for {E} on {V}",
            "those who wait for {E} wait until {V}",
        ),
        (
            ("on which day does {E} take place", "on which day {E} takes place"),
            ("on which day will {E} be held", "on which day {E} will be held"),
            ("on which day do people meet for {E}", "on which day people meet for {E}"),
        ),
    ),
    Relation(
        "event",
        "starting time",
        names.clock,
        (
            "{E} begins at {V}",
            "{E} starts at {V}",
            "for {E} the bell rings at {V}",
            "guests of {E} take their seats at {V}",
        ),
        (
            ("when does {E} begin", "when {E} begins"),
            ("at what time does {E} start", "at what time {E} starts"),
            ("when does the bell ring for {E}", "when the bell rings for {E}"),
        ),
    ),
    Relation(
        "event",
        "guest",
        names.person,
        (
            "{E} welcomes {V}",
            "{E} has invited {V}",
            "the one who was invited to {E} is {V}",
            "people come to {E} to see {V}",
        ),
        (
            ("whom does {E} welcome", "whom {E} welcomes"),
            _both("who was invited to {E}"),
            ("whom do people come to {E} to see", "whom people come to {E} to see"),
        ),
        person=True,
    ),
    Relation(
        "event",
        "room number",
        names.digits(3),
        (
            "{E} takes place in room {V}",
            "{E} is held in room {V}",
            "people meet for {E} in room {V}",
            "the chairs for {E} are in room {V}",
        ),
        (
            ("in which room does {E} take place", "in which room {E} takes place"),
            ("in which room is {E} held", "in which room {E} is held"),
            ("in which room are the chairs for {E}", "in which room the chairs for {E} are"),
        ),
    ),
)

KINDS: dict[str, tuple[Relation, ...]] = {
    kind: tuple(relation for relation in RELATIONS if relation.kind == kind)
    for kind in ("place", "person", "machine", "event")
}
