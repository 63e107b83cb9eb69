"""Conversations as rows of tokens for a network: what it reads, and which tokens it is to predict."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sglang_hybrid.demo.reader import conversations, tokens
from sglang_hybrid.demo.reader.conversations import Conversation
from sglang_hybrid.demo.reader.curriculum import Drawn
from sglang_hybrid.demo.reader.names import TRAIN
from sglang_hybrid.demo.reader.questions import ABSENT, FOLLOW, HOPS, NOW, ONE, TALK, WHICH, YES_NO, Turn


@dataclass(slots=True)
class Encoded:
    """`ids` of a conversation and the part of each (`conversations.pieces`); `answers`: first and last position + 1."""

    ids: list[int]
    parts: list[int]
    answers: list[tuple[Turn, int, int]]


def encode(conversation: Conversation) -> Encoded:
    made = Encoded([], [], [])
    turns = iter(conversation.turns)
    start = None
    for text, part in conversations.pieces(conversation):
        ids = _pieces(text) if part >= 0 else tuple(tokens.load().encode(text).ids)
        if part >= 0 and start is None:
            start = len(made.ids)
        made.ids += ids
        made.parts += [part] * len(ids)
        if part >= 0 and text == tokens.END and start is not None:
            made.answers.append((next(turns), start, len(made.ids)))
            start = None
    return made


@lru_cache(maxsize=100_000)
def _pieces(text: str) -> tuple[int, ...]:
    return tuple(tokens.load().encode(text).ids)


MIX = {ONE: 3.5, NOW: 3.0, HOPS: 3.0, WHICH: 3.5, YES_NO: 4.0, ABSENT: 4.0, FOLLOW: 3.0, TALK: 0.5}
"""How often a training asks for each kind: more often for what is learned slowly."""


def row(rng: random.Random, drawn: Drawn) -> tuple[list[int], list[int]]:
    """Ids and parts of a row and one token: one conversation, and further ones behind it where it is too short."""
    ids: list[int] = []
    parts: list[int] = []
    while len(ids) <= drawn.length:
        left = drawn.length - len(ids)
        share = drawn.share if rng.random() < 0.97 else 0.0
        shape = conversations.shape_for(rng, max(left, 96), share, drawn.filler, TRAIN, TRAIN)
        made = encode(conversations.draw(rng, shape, max(2, round(left * (1 - share) / 28)), MIX))
        ids += made.ids
        parts += made.parts
    return ids[: drawn.length + 1], parts[: drawn.length + 1]


WEIGHTS = (1.0, 2.0, 6.0)
"""Of an answer's tokens that are said anyway, of the values in it, of what one token decides."""

READ_WEIGHT, READ_SHARE = 0.1, 0.2
"""Of the tokens that are only read; this share of them is predicted, at the weight of all."""


def batch(rng: random.Random, size: int, drawn: Drawn) -> tuple[Tensor, ...]:
    """`size` tokens: inputs [rows, length], mask of predicted positions [rows, length], their targets [n], weights."""
    rows = [row(rng, drawn) for _ in range(max(1, size // drawn.length))]
    ids = torch.tensor([ids for ids, _ in rows])
    parts = torch.tensor([parts for _, parts in rows])[:, 1:]
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    sampled = torch.rand(parts.shape, generator=generator) < READ_SHARE
    keep = (parts >= 0) | sampled
    table = torch.tensor([READ_WEIGHT / READ_SHARE, *WEIGHTS])
    return ids[:, :-1].contiguous(), keep, ids[:, 1:][keep], table[parts[keep] + 1]
