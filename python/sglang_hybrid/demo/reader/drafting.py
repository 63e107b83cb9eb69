"""The head of `reader-gdn` learns to draft what the reader will say, and how much of it is right."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from sglang_hybrid.demo.reader import examples
from sglang_hybrid.demo.reader.curriculum import Drawn
from sglang_hybrid.demo.reader.network.head import PREFIX, Head, initialise
from sglang_hybrid.demo.reader.network.models import Reader
from sglang_hybrid.demo.reader.optimizer import optimizers

MODEL = "reader-gdn"
DRAFTED = 3
"""Tokens of a draft."""

STEP_TOKENS, LENGTHS = 2048, (128, 256, 256, 512, 512, 1024)
"""Of a step, and of its rows."""

WARM_UP_STEPS, COOL_DOWN = 20, 0.6


@dataclass(frozen=True, slots=True)
class Accepted:
    """Of drafts that begin at each place of an answer: `shares` with the first, the first two, ... guesses right, at
    `places` places. `length`: tokens of a verification, its own one included, where one follows the other."""

    shares: tuple[float, ...]
    length: float
    places: int


def drafts(reader: Reader, head: Head, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What the reader says behind each of `ids` [rows, n] (logits), and what the head makes of each step of a draft
    that begins there (logits [rows, n - DRAFTED, vocabulary]): step i is what the reader says i + 1 places later."""
    with torch.no_grad():
        states = reader.model(ids)
        said = F.linear(states, reader.model.embed_tokens.weight)
    count = ids.shape[1] - DRAFTED
    read = [reader.model.embed_tokens(ids[:, 1 + step : 1 + step + count]) for step in range(DRAFTED)]
    made = head(states[:, :count], read)
    return said, [F.linear(each, reader.model.embed_tokens.weight) for each in made]


def loss(reader: Reader, head: Head, ids: Tensor, parts: Tensor) -> Tensor:
    """Cross entropy of the head's guesses about answers (`examples.row`) against all that the reader would say."""
    said, guessed = drafts(reader, head, ids)
    total = torch.zeros(())
    for step, logits in enumerate(guessed):
        count = logits.shape[1] - 1  # the last row of the last step has nothing behind it
        keep = parts[:, 2 + step : 2 + step + count] >= 0
        wanted = said[:, 1 + step : 1 + step + count][keep].softmax(-1)
        total = total - (wanted * logits[:, :count][keep].log_softmax(-1)).sum(-1).mean() / DRAFTED
    return total


def train(reader: Reader, steps: int, seed: int, say: Callable[[str], None]) -> tuple[Head, int]:
    """A head trained for `steps`, and the tokens it has seen; the same seed and steps give the same on one machine."""
    head = Head()
    initialise(head, reader)
    reader.requires_grad_(False)
    moving = optimizers(head, other_lr=0.002)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in moving]
    seen, mean, spoken = 0, 0.0, time.monotonic()
    for step in range(steps):
        rng = random.Random(f"head {seed} {step}")
        length = rng.choice(LENGTHS)
        drawn = Drawn(STEP_TOKENS, length, rng.uniform(0.35, 0.75), rng.uniform(0.0, 1.0))
        rows = [examples.row(rng, drawn) for _ in range(STEP_TOKENS // length)]
        now = loss(reader, head, torch.tensor([ids for ids, _ in rows]), torch.tensor([parts for _, parts in rows]))
        torch.autograd.backward(now)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        factor = min(1.0, (step + 1) / WARM_UP_STEPS) * max(0.03, min(1.0, (1 - step / steps) / COOL_DOWN))
        for optimizer, rate in zip(moving, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += STEP_TOKENS
        mean = now.item() if step == 0 else 0.95 * mean + 0.05 * now.item()
        if time.monotonic() - spoken > 30 or step + 1 == steps:
            spoken = time.monotonic()
            say(f"{(step + 1) / steps:4.0%}  step {step + 1}  {seen / 1e6:.2f}M tokens  loss {mean:.3f}")
    return head.eval(), seen


@torch.no_grad()
def accepted(reader: Reader, head: Head, texts: Iterable[tuple[list[int], list[tuple[int, int]]]]) -> Accepted:
    """Of `texts`, each the ids of a conversation and where its answers begin and end (`examples.Encoded`)."""
    hits, places, told, passes = torch.zeros(DRAFTED), 0, 0, 0
    for ids, answers in texts:
        said, guessed = drafts(reader, head, torch.tensor([ids + [0] * DRAFTED]))
        says = said[0].argmax(-1)
        right = torch.stack([each[0].argmax(-1) == says[1 + i :][: len(ids)] for i, each in enumerate(guessed)])
        runs = right.cumprod(0)
        for begin, end in answers:
            # The prompt gives the first token of the answer; a draft is made of it and of the state before it.
            hits += runs[:, begin - 1 : end - 1 - DRAFTED].sum(1)
            places += max(0, end - begin - DRAFTED)
            place = begin
            while place < end - 1:
                run = min(1 + int(runs[:, place - 1].sum()), end - 1 - place)
                place, told, passes = place + run, told + run, passes + 1
    return Accepted(tuple((hits / max(1, places)).tolist()), told / max(1, passes), places)


def load(file: Path) -> Head:
    """The head whose weights are in `file`, in float32."""
    head = Head()
    head.load_state_dict({name.removeprefix(PREFIX): weight for name, weight in load_file(file).items()})
    return head.float().eval()
