"""Names and values of the readers' world. Names are put together from two parts; a fifth of the pairs is held out."""

from __future__ import annotations

import random
from collections.abc import Callable

TRAIN, HELD = "train", "held"
"""The two halves of everything: what training sees, and what only evaluation does."""


def _words(text: str) -> list[str]:
    return text.split()


HEADS = _words(
    "Tol Ber Luk Mav Vesk Kov Suk Hal Nov Drem Fel Grim Osk Brim Sil Kal Rem Vik Mok Tark Hol Jov Lim Sov Vald Ask Elm "
    "Frob Gal Hem Isk Jam Kil Lob Mel Nek Orm Pel Rok Skel Tuk Ulv Wil Yst Zam Bok Dag Erk"
)
TAILS = _words(
    "vik ham holm mora berg stad sen fors nes vang ry tan wick ton gard sund mark ley borg ro hus bek mund sted"
)
WOMEN = _words("Mara Ella Ida Nora Vera Lena Rosa Tilda Greta Hanna Clara Olga Sara Julia Edith Freya Agnes Petra")
MEN = _words("Jonas Emil Oskar Peter Anton Hugo Felix David Simon Viktor Adam Leo Karl Oliver Tom Rolf Arne Bruno")

PLACES = _words("harbour mill museum library bakery station school garden market hotel tower chapel workshop stable")
MACHINES = _words("pump press crane oven lathe boiler drill loom saw winch mixer lift")
EVENTS = _words("concert fair race lecture auction parade dinner dance tournament reading")

COLOURS = _words("red blue green yellow white black brown grey orange purple")
JOBS = _words("baker teacher doctor painter sailor farmer lawyer tailor gardener miner pilot cook")
INSTRUMENTS = _words("piano violin flute drum harp trumpet guitar organ cello")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
METALS = _words("iron copper steel brass oak pine stone glass")


def name(rng: random.Random, split: str) -> str:
    """A name of two parts, such as `Tolvik`."""
    while True:
        head, tail = rng.randrange(len(HEADS)), rng.randrange(len(TAILS))
        if ((head * 7 + tail * 3) % 5 == 0) == (split == HELD):
            return HEADS[head] + TAILS[tail]


def person(rng: random.Random, split: str) -> str:
    return f"{rng.choice(WOMEN + MEN)} {name(rng, split)}"


def woman(rng: random.Random, split: str) -> str:
    return f"{rng.choice(WOMEN)} {name(rng, split)}"


def man(rng: random.Random, split: str) -> str:
    return f"{rng.choice(MEN)} {name(rng, split)}"


def is_woman(person_name: str) -> bool:
    return person_name.split()[0] in WOMEN


def digits(count: int) -> Callable[[random.Random, str], str]:
    return lambda rng, split: "".join(rng.choice("123456789") for _ in range(count))


def clock(rng: random.Random, split: str) -> str:
    return f"{rng.randint(1, 12)}:{rng.choice('012345')}{rng.choice('05')}"


def one_of(words: list[str]) -> Callable[[random.Random, str], str]:
    return lambda rng, split: rng.choice(words)
