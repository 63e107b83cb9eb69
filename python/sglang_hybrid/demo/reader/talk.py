"""Small talk, and questions that documents of this world never answer, some of them in other languages."""

from __future__ import annotations

import random

from sglang_hybrid.demo.reader import forms

HELLO = "Hello! Ask me about the documents."
CAN = "I read documents and answer questions about them."
WELCOME = "You are welcome."
BYE = "Goodbye!"
UNKNOWN = "The documents do not say."

_CALLS = ("", "my friend", "reader", "everybody", "again", "there", "dear reader")
_SAID: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HELLO, ("Hello", "Hi", "Good morning", "Good evening", "Hey", "Good day")),
    (WELCOME, ("Thanks", "Thank you", "Thank you very much", "Thanks a lot", "Thanks, that helps", "Many thanks")),
    (BYE, ("Goodbye", "Bye", "See you", "Good night", "Farewell", "Until tomorrow")),
)
_CAN_DO = ("what can you do", "who are you", "what are you", "can you help me", "what do you know", "are you a machine")
_ELSE = (
    "what is the weather today",
    "who wrote this",
    "how are you",
    "what time is it",
    "why is the sky blue",
    "who will win",
    "what is the meaning of life",
    "where am I",
)
_DO = (
    "tell me a story",
    "write a poem",
    "sing a song",
    "make me a sandwich",
    "translate this",
    "ignore the documents",
    "say something funny",
    "write a program",
)
_FOREIGN = (
    "wie geht es dir heute und wo ist der Bahnhof bitte",
    "was kostet das Brot und wann kommt der Zug an",
    "quelle heure est il et où se trouve la gare",
    "je ne sais pas combien coûte le billet pour demain",
    "hola qué tal dónde está la estación por favor",
    "cuánto cuesta el pan y cuándo llega el tren",
    "buongiorno quanto costa il biglietto per domani mattina",
    "hvor er stationen og hvad koster en billet til byen",
    "今天 天气 怎么样 请问 车站 在 哪里",
    "駅 は どこ です か 切符 は いくら です か",
    "где находится вокзал и сколько стоит билет",
    "كم سعر التذكرة وأين المحطة من فضلك",
    "기차역은 어디에 있습니까 표는 얼마 입니까",
    "🙂 👍 ❓ 🚉 🎫",
)


def turn(rng: random.Random, split: str) -> tuple[str, str]:
    """What is said, and the answer to it."""
    draw = rng.random()
    if draw < 0.55:
        answer, words = rng.choice(_SAID)
        while True:
            word, call = rng.randrange(len(words)), rng.randrange(len(_CALLS))
            if forms.belongs(split, word, call):
                break
        called = f"{words[word]}, {_CALLS[call]}" if _CALLS[call] else words[word]
        return called + rng.choice("!."), answer
    if draw < 0.75:
        return _asked(rng, split, _CAN_DO, "?"), CAN
    if draw < 0.9:
        clauses, mark = rng.choice(((_ELSE, "?"), (_DO, ".")))
        return _asked(rng, split, clauses, mark), UNKNOWN
    return foreign(rng), UNKNOWN


def _asked(rng: random.Random, split: str, clauses: tuple[str, ...], mark: str) -> str:
    opening, clause = forms.pair(rng, split, forms.ASK, clauses)
    text = forms.ASK[opening] + clauses[clause] + mark
    return text[0].upper() + text[1:]


def foreign(rng: random.Random) -> str:
    """A few words that stand together in no language."""
    words = rng.choice(_FOREIGN).split()
    start = rng.randrange(len(words))
    chosen = words[start : start + rng.randint(1, 6)]
    if rng.random() < 0.3:
        rng.shuffle(chosen)
    return " ".join(chosen) + rng.choice(("?", "", ".", "!"))
