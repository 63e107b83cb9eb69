"""Sentences and questions: an opening, a clause and an ending, each drawn by itself.

A form is a pair of an opening and a clause. A fifth of all pairs is held out: training sees every opening and every
clause, but never these two together.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from sglang_hybrid.demo.reader.names import HELD
from sglang_hybrid.demo.reader.relations import Relation

PLAIN = 0.3
"""How often a sentence has the first opening of its list, which is the shortest."""

SAID: tuple[str, ...] = (
    "the {N} of {E} is {V}",
    "{E} has the {N} {V}",
    "for {E} the {N} is {V}",
    "the {N} that belongs to {E} is {V}",
    "{E} is known for the {N} {V}",
    "whoever asks for the {N} of {E} hears {V}",
    "{E}'s {N} is {V}",
)
"""What can be said of any relation; those of one relation alone are in `relations`."""

OPENINGS = (
    "",
    "we were told that ",
    "everyone knows that ",
    "note that ",
    "it is said that ",
    "one should know that ",
    "according to the list, ",
    "as far as we know, ",
    "by the way, ",
    "as always, ",
    "a letter says that ",
    "remember that ",
    "it is true that ",
    "in this town ",
    "in short, ",
    "nobody denies that ",
)
ENDINGS = ("", "", "", "", "", "", ", as everyone knows", ", they say", ", so we were told", ", and that is all")

CHANGE_OPENINGS = (
    "from now on ",
    "since last week ",
    "as of today ",
    "correction: ",
    "there is news: ",
    "this is new: ",
    "things have changed: ",
    "what we wrote before is wrong, for ",
    "no longer as before, ",
)
"""They mark a fact that takes the place of an earlier one, and stand before any clause."""

CHANGED = (
    "the new {N} of {E} is {V}",
    "the {N} of {E} has changed to {V}",
    "{E} has a new {N}, {V}",
    "the {N} of {E} is now {V}",
    "for {E} the new {N} is {V}",
)
"""They mark it by themselves, behind any opening."""

AGAIN = ("{P} {N} is {V}", "the {N} is {V}", "{P} {N} is said to be {V}")
"""One more fact of the entity of the sentence before."""

# Questions. Those that stand alone:
ASK = (
    "",
    "so ",
    "now, ",
    "one question: ",
    "by the way, ",
    "tell me: ",
    "once more: ",
    "hello, ",
    "just one thing: ",
    "good, ",
    "please: ",
    "and then, ",
)
DIRECT = (
    "what is the {N} of {E}",
    "which {N} does {E} have",
    "for {E}, what is the {N}",
    "what do the documents say about the {N} of {E}",
    "which {N} belongs to {E}",
)
# Those inside another one; the mark ends them.
ASK_INDIRECT = (
    ("do you know ", "?"),
    ("could you tell me ", "?"),
    ("can you say ", "?"),
    ("please tell me ", "."),
    ("I would like to know ", "."),
    ("I want to know ", "."),
    ("tell me ", "."),
    ("may I ask ", "?"),
    ("I wonder ", "."),
    ("do the documents say ", "?"),
    ("we need to know ", "."),
    ("somebody asks ", "."),
)
INDIRECT = ("what the {N} of {E} is", "which {N} {E} has", "which {N} belongs to {E}", "what {E} has as the {N}")
# Those that name a thing.
ASK_THING = (
    ("tell me ", "."),
    ("please give me ", "."),
    ("I need ", "."),
    ("look up ", "."),
    ("do you know ", "?"),
    ("could you tell me ", "?"),
    ("I am looking for ", "."),
    ("what about ", "?"),
    ("we are interested in ", "."),
    ("can you find ", "?"),
)
THINGS = ("the {N} of {E}", "the {N} that {E} has", "the {N} that belongs to {E}", "{E}'s {N}")

NEW = ("new", "present", "latest")

ASK_THAT = (
    "is it true that ",
    "is it right that ",
    "do the documents say that ",
    "am I right that ",
    "could it be that ",
    "can you confirm that ",
    "would you say that ",
)
IS_IT = ("is {V} the {N} of {E}", "is the {N} of {E} {V}")
WHICH = (
    "which document gives {T}",
    "which document has {T}",
    "in which document is {T}",
    "which of the documents says {I}",
    "where do the documents say {I}",
)
SAME_ENTITY = ("and the {N}", "and {p} {N}", "what about the {N}", "what about {p} {N}", "how about {p} {N}")
SAME_RELATION = ("and of {E}", "and for {E}", "what about {E}", "how about {E}", "and {E}")
FAMILY = ("and {p} {R}'s", "what about {p} {R}'s", "and that of {p} {R}", "how about that of {p} {R}")
ASK_ON = ("", "thanks, ", "good, ", "thank you, ", "fine, ", "I see, ", "okay, ", "very well, ")


TOKENIZER = "tokenizer"
"""The forms of the tokenizer's text: those of training, but for pairs without an opening that it did not have then."""


def belongs(split: str, opening: int, clause: int) -> bool:
    """Whether this pair is one of `split`.

    Training sees every clause without an opening (number 0): there its first word has a capital, which is a word of its
    own.
    """
    fifth = (3 * opening + 2 * clause + 1) % 5 == 0
    return (fifth and (opening > 0 or split == TOKENIZER)) == (split == HELD)


def pair(rng: random.Random, split: str, openings: Sequence[object], clauses: Sequence[object]) -> tuple[int, int]:
    """An opening and a clause that belong to `split`, as indices."""
    while True:
        opening = 0 if rng.random() < PLAIN else rng.randrange(len(openings))
        clause = rng.randrange(len(clauses))
        if belongs(split, opening, clause):
            return opening, clause


def _joined(rng: random.Random, split: str, openings: Sequence[str], clauses: Sequence[str]) -> str:
    opening, clause = pair(rng, split, openings, clauses)
    return openings[opening] + clauses[clause]


def clauses_of(relation: Relation) -> tuple[str, ...]:
    return SAID + relation.said


def said(rng: random.Random, split: str, relation: Relation) -> str:
    """A sentence that tells a fact of `relation`."""
    return _joined(rng, split, OPENINGS, clauses_of(relation)) + rng.choice(ENDINGS) + "."


def changed(rng: random.Random, split: str, relation: Relation) -> str:
    """A sentence that tells a fact of `relation` and says that it takes the place of an earlier one."""
    if rng.random() < 0.5:
        return _joined(rng, split, CHANGE_OPENINGS, clauses_of(relation)) + rng.choice(ENDINGS) + "."
    return _joined(rng, split, OPENINGS, CHANGED) + rng.choice(ENDINGS) + "."


def again(rng: random.Random, split: str) -> str:
    return _joined(rng, split, OPENINGS, AGAIN) + rng.choice(ENDINGS) + "."


def _end(rng: random.Random, mark: str) -> str:
    return (", please" if rng.random() < 0.15 else "") + mark


def asked(rng: random.Random, split: str, relation: Relation, now: bool = False) -> str:
    """A question for a fact of `relation`; `now`: it says that the latest value is wanted."""
    way = rng.choices(("direct", "indirect", "thing"), (5, 3, 3))[0]
    if way == "thing":
        opening, clause = pair(rng, split, ASK_THING, THINGS)
        text, mark = ASK_THING[opening]
        return text + _new(rng, THINGS[clause], now) + _end(rng, mark)
    if way == "direct":
        clauses = DIRECT + tuple(wh[0] for wh in relation.asked)
        opening, clause = pair(rng, split, ASK, clauses)
        text, mark = ASK[opening], "?"
    else:
        clauses = INDIRECT + tuple(wh[1] for wh in relation.asked)
        opening, clause = pair(rng, split, ASK_INDIRECT, clauses)
        text, mark = ASK_INDIRECT[opening]
    return text + _new(rng, clauses[clause], now) + _end(rng, mark)


def _new(rng: random.Random, clause: str, now: bool) -> str:
    if not now:
        return clause
    if "{N}" in clause and rng.random() < 0.6:
        return clause.replace("{N}", f"{rng.choice(NEW)} {{N}}")
    return f"{clause} now"


def confirmed(rng: random.Random, split: str, relation: Relation) -> str:
    """A question whether {V} is the value of `relation`."""
    if rng.random() < 0.4:
        return _joined(rng, split, ASK, IS_IT) + "?"
    return _joined(rng, split, ASK_THAT, clauses_of(relation)) + "?"


def which(rng: random.Random, split: str, relation: Relation) -> str:
    """A question for the document that tells a fact of `relation`."""
    indirect = INDIRECT + tuple(wh[1] for wh in relation.asked)
    text = _joined(rng, split, ASK, WHICH)
    return text.replace("{T}", rng.choice((THINGS[0], *THINGS[2:]))).replace("{I}", rng.choice(indirect)) + "?"


def followed(rng: random.Random, split: str, clauses: tuple[str, ...]) -> str:
    """A question that is only understood from the one before: SAME_ENTITY, SAME_RELATION or FAMILY."""
    return _joined(rng, split, ASK_ON, clauses) + "?"


def through(rng: random.Random, first: Relation) -> str:
    """A person by what they are to an entity, to stand for {E} in a question of two hops."""
    return rng.choice(THINGS[:3]).replace("{N}", first.noun)
