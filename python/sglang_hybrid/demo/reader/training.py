"""One training: steps, progress, checkpoints; the same seed and steps give the same weights on the same machine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.demo.reader import checkpoint, curriculum, evaluation, examples, tokens
from sglang_hybrid.demo.reader.network import models
from sglang_hybrid.demo.reader.optimizer import optimizers


@dataclass(frozen=True, slots=True)
class Plan:
    """How long: `minutes` of training (sleep and evaluation not counted) or `steps`."""

    model: str
    minutes: float | None = None
    steps: int | None = None
    seed: int = 1
    device: str = "cpu"
    scale: int = 1
    """Tokens of a step, in multiples of the curriculum's: for a GPU."""
    evaluate_every: float = 180.0
    """Seconds between evaluations and checkpoints."""


class Training:
    """A network, its optimizers and where its training stands."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.rng = random.Random(plan.seed)
        self.network = models.READERS[plan.model](tokens.VOCABULARY)
        models.initialise(self.network, torch.Generator().manual_seed(plan.seed))
        self.network.to(plan.device)
        self.optimizers = optimizers(self.network)
        self.rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.curve: list[dict[str, Any]] = []

    @property
    def progress(self) -> float:
        if self.plan.steps is not None:
            return self.step / self.plan.steps
        assert self.plan.minutes is not None
        return self.seconds / (60 * self.plan.minutes)

    def run(self, say: Callable[[str], None]) -> None:
        """Train to the end of the plan, saying how it goes."""
        loss, spoken, saved = None, time.monotonic(), time.monotonic()
        while self.progress < 1:
            start = time.monotonic()
            now = self.train_step()
            loss = now if loss is None else 0.95 * loss + 0.05 * now
            self.seconds += time.monotonic() - start
            if time.monotonic() - spoken > 20:
                spoken = time.monotonic()
                say(self.line(loss))
            if time.monotonic() - saved > self.plan.evaluate_every or self.progress >= 1:
                self.record(loss, say)
                saved = time.monotonic()

    def train_step(self) -> float:
        """One step; returns its loss."""
        size, length, share, filler = curriculum.at(self.progress, self.rng)
        read, keep, targets, weights = (
            tensor.to(self.plan.device)
            for tensor in examples.batch(self.rng, size * self.plan.scale, length, share, filler)
        )
        with torch.autocast(self.plan.device, torch.bfloat16, enabled=self.plan.device != "cpu"):
            logits = self.network(read, keep)
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * curriculum.rate(self.progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += read.numel()
        return float(loss.detach())

    def line(self, loss: float) -> str:
        speed = self.tokens / max(self.seconds, 1e-9)
        return (
            f"{min(self.progress, 1):4.0%}  step {self.step}  {self.tokens / 1e6:.2f}M tokens  "
            f"{self.seconds / 60:.1f} min  {speed:,.0f} tokens/s  loss {loss:.3f}"
        )

    def record(self, loss: float, say: Callable[[str], None]) -> None:
        """Evaluate a little, add a point to the curve, write a checkpoint."""
        rng = random.Random(self.step)
        length = 320 if self.progress < 0.5 else 640
        made = (evaluation.held_out(rng, length, 8) for _ in range(20))
        counts = evaluation.score(self.network, made, self.plan.device)
        accuracy = {kind: round(right / count, 3) for kind, (right, count) in sorted(counts.items())}
        say("  held out: " + ", ".join(f"{kind} {share:.0%}" for kind, share in accuracy.items()))
        point = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds), "loss": round(loss, 4)}
        self.curve.append({**point, "length": length, "accuracy": accuracy})
        self.save()

    def save(self) -> None:
        checkpoint.save(
            self.folder,
            {
                "model": self.plan.model,
                "seed": self.plan.seed,
                "step": self.step,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "curve": self.curve,
                "rng": self.rng.getstate(),
                "network": self.network.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            },
        )

    def resume(self) -> None:
        """Go on from the folder's last checkpoint."""
        content = checkpoint.load(self.folder)
        if content["model"] != self.plan.model:
            raise ConfigError(f"the checkpoint is of {content['model']}, not of {self.plan.model}: {self.folder}")
        self.step, self.tokens, self.seconds = content["step"], content["tokens"], content["seconds"]
        self.curve = content["curve"]
        version, state, gauss = content["rng"]
        self.rng.setstate((version, tuple(state), gauss))
        self.network.load_state_dict(content["network"])
        for optimizer, state in zip(self.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(state)
