"""Sentences that carry no answer, some of them about an entity that has one."""

from __future__ import annotations

import random


def _words(text: str) -> list[str]:
    return text.split()


_PLAIN = (
    "The wind came from the {side} and the {thing} stood {state} in the {time}.",
    "Nobody remembers why the {thing} was left near the {other}.",
    "In the {time} the {thing} looks {state}.",
    "Some say that a {state} {thing} is better than a {other}.",
    "It rained for days, and the {thing} was {state}.",
    "Children play with a {thing} behind the {other}.",
    "There was talk of a {state} {thing}, but it came to nothing.",
    "A {thing} and a {other} were found in the {time}.",
    "The road to the {side} is long and {state}.",
    "Every {time} a {state} {thing} passes by.",
)
_ABOUT = (
    "Many people like {E} in the {time}.",
    "An old {thing} reminds everyone of {E}.",
    "There is a {state} picture of {E} near the {other}.",
    "Much has been written about {E}, most of it {state}.",
    "On the {side} side one hears little of {E}.",
)
_WORDS = {
    "side": _words("north south east west"),
    "thing": _words("boat bridge cart lamp basket ladder barrel rope bench clock kettle fence"),
    "other": _words("well wall tree church river field barn pond hill"),
    "state": _words("quiet empty old broken heavy strange pretty dusty bright cold"),
    "time": _words("morning evening winter summer spring autumn night"),
}


def sentence(rng: random.Random, entity: str | None = None) -> str:
    """A sentence without a fact, about `entity` if one is given."""
    words = {slot: rng.choice(choices) for slot, choices in _WORDS.items()}
    text = rng.choice(_PLAIN if entity is None else _ABOUT).format(E=entity, **words)
    return text[0].upper() + text[1:]
