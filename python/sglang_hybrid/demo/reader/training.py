"""One training: steps, progress, checkpoints; the same seed and steps give the same weights on the same machine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.demo.reader import checkpoint, evaluation, examples, tokens, weights
from sglang_hybrid.demo.reader.curriculum import CURRICULA, PARTS, Curriculum, Drawn
from sglang_hybrid.demo.reader.names import HELD, TRAIN
from sglang_hybrid.demo.reader.network import models
from sglang_hybrid.demo.reader.optimizer import optimizers
from sglang_hybrid.demo.reader.team import Team


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train for how many `steps`."""

    model: str
    steps: int
    seed: int = 1
    device: str = "cpu"
    scale: int = 1
    """Tokens of a step, in multiples of the curriculum's: for a GPU."""


SAY_EVERY, SAVE_EVERY, EVALUATE_EVERY = 30.0, 180.0, 900.0
"""Seconds between lines, checkpoints and evaluations."""


@dataclass(slots=True)
class Passed:
    """Where a training stands; `seconds` of training alone, evaluations not counted."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    before: list[dict[str, Any]] = field(default_factory=list)
    """The trainings that made the weights it began with; `tokens`, `seconds` and `curve` are over all of them."""


_PASSED = ("step", "tokens", "seconds", "curve", "before")


class Training:
    """A network, its optimizers and where its training stands, in one process of a team."""

    def __init__(self, plan: Plan, folder: Path, team: Team | None = None) -> None:
        self.plan, self.folder, self.team = plan, folder, team or Team()
        self.network = models.READERS[plan.model](tokens.VOCABULARY)
        models.initialise(self.network, torch.Generator().manual_seed(plan.seed))
        self.network.to(plan.device)
        self.optimizers = optimizers(self.network, self.team)
        self.in_bfloat16 = plan.device != "cpu" or torch.cpu._is_avx512_bf16_supported()
        """Whether matrices are multiplied in it: where that is faster than in float32."""
        self.rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.passed = Passed()

    @property
    def progress(self) -> float:
        return self.passed.step / self.plan.steps

    @property
    def curriculum(self) -> Curriculum:
        return CURRICULA[min(len(self.passed.before), len(CURRICULA) - 1)]

    def run(self, say: Callable[[str], None]) -> None:
        """Train to the end of the plan, saying how it goes; the first process of a team evaluates and saves."""
        loss, spoken, saved, judged = None, *(time.monotonic(),) * 3
        while self.progress < 1:
            start = time.monotonic()
            now = self.train_step()
            loss = now if loss is None else 0.95 * loss + 0.05 * now
            self.passed.seconds += time.monotonic() - start
            if self.team.rank:
                continue
            if time.monotonic() - spoken > SAY_EVERY:
                spoken = time.monotonic()
                say(self.line(loss))
            if time.monotonic() - judged > EVALUATE_EVERY or self.progress >= 1:
                self.record(loss, say)
                saved = judged = time.monotonic()
            elif time.monotonic() - saved > SAVE_EVERY:
                self.save()
                saved = time.monotonic()

    def train_step(self) -> float:
        """One step; returns its loss."""
        step = self.passed.step
        drawn = self.curriculum.at(self.progress, random.Random(f"{self.plan.seed} {step}"))
        total = torch.zeros(())
        for part in self.team.shares(PARTS):
            total += self._gradients(random.Random(f"{self.plan.seed} {step} {part}"), drawn) / PARTS
        self.team.add([*(weight.grad for weight in self.network.parameters() if weight.grad is not None), total])
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * self.curriculum.rate(self.progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.passed.step += 1
        self.passed.tokens += drawn.tokens * self.plan.scale
        return float(total)

    def _gradients(self, rng: random.Random, drawn: Drawn) -> torch.Tensor:
        """Add the gradients of one part of a step; returns its loss."""
        size = drawn.tokens * self.plan.scale // PARTS
        batch = examples.batch(rng, size, drawn)
        read, keep, targets, weights = (tensor.to(self.plan.device) for tensor in batch)
        with torch.autocast(self.plan.device, torch.bfloat16, enabled=self.in_bfloat16):
            logits = self.network(read, keep)
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        (loss / PARTS).backward()
        return loss.detach().cpu()

    def line(self, loss: float) -> str:
        passed = self.passed
        speed = passed.tokens / max(passed.seconds, 1e-9)
        return (
            f"{min(self.progress, 1):4.0%}  step {passed.step}  {passed.tokens / 1e6:.2f}M tokens  "
            f"{passed.seconds / 60:.1f} min  {speed:,.0f} tokens/s  loss {loss:.3f}"
        )

    def record(self, loss: float, say: Callable[[str], None]) -> None:
        """Evaluate a little, add a point to the curve, write a checkpoint."""
        passed = self.passed
        length = 1024 if self.progress >= 0.5 or passed.before else 320
        point: dict[str, Any] = {"step": passed.step, "tokens": passed.tokens, "seconds": round(passed.seconds)}
        point |= {"loss": round(loss, 4), "length": length}
        for form, name in ((HELD, "accuracy"), (TRAIN, "seen_forms")):
            rng = random.Random(f"{passed.step} {form}")
            made = (evaluation.held_out(rng, length, length // 40, form) for _ in range(16))
            counts = evaluation.score(self.network, made, self.plan.device)
            point[name] = {kind: round(right / count, 3) for kind, (right, count) in sorted(counts.items())}
            say(f"  {form}: " + ", ".join(f"{kind} {share:.0%}" for kind, share in point[name].items()))
        passed.curve.append(point)
        self.save()

    def save(self) -> None:
        passed = self.passed
        checkpoint.save(
            self.folder,
            {
                "model": self.plan.model,
                "seed": self.plan.seed,
                **{name: getattr(passed, name) for name in _PASSED},
                "network": self.network.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            },
        )

    def resume(self) -> None:
        """Go on from the folder's last checkpoint."""
        content = checkpoint.load(self.folder)
        if (content["model"], content["seed"]) != (self.plan.model, self.plan.seed):
            raise ConfigError(
                f"the checkpoint is of {content['model']} with seed {content['seed']}; "
                f"give --model and --seed of the training it is of: {self.folder}"
            )
        self.passed = Passed(*(content[name] for name in _PASSED))
        self.network.load_state_dict(content["network"])
        for optimizer, state in zip(self.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def begin_with_published(self) -> None:
        """Begin with the published weights. Raises ConfigError where they are damaged, or were trained with the seed of
        this plan: it would read the same documents again."""
        card = weights.card(self.plan.model)
        trainings = card["trainings"]
        if any(one["seed"] == self.plan.seed for one in trainings):
            raise ConfigError(
                f"the published weights were trained with this seed; give another --seed: {self.plan.seed}"
            )
        self.network.load_state_dict(weights.network(self.plan.model).state_dict())
        self.passed = Passed(0, card["tokens"], card["seconds"], card["curve"], trainings)
