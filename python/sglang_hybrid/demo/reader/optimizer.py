"""Muon for the matrices inside a network, Adam for everything else.

Muon (Jordan et al., 2024): the momentum of a matrix is replaced by the nearest orthogonal one, by five Newton-Schulz
steps, before it is applied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sglang_hybrid.demo.reader.team import Team

_STEPS = ((3.4445, -4.7750, 2.0315),) * 5


def orthogonal(stack: Tensor) -> Tensor:
    """Each matrix of `stack` [n, rows, columns], its singular values near 1 (0.7 to 1.2)."""
    wide = stack.shape[-2] <= stack.shape[-1]
    x = stack if wide else stack.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in _STEPS:
        square = x @ x.transpose(-1, -2)
        x = a * x + (b * square + c * (square @ square)) @ x
    return x if wide else x.transpose(-1, -2)


class Muon(torch.optim.Optimizer):
    """Momentum 0.95 (Nesterov); each process of the team makes its share of the updates orthogonal."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, decay: float = 0.0, team: Team | None = None):
        super().__init__(list(parameters), {"lr": lr, "decay": decay, "momentum": 0.95})
        self.team = team or Team()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            updates = [self._momentum(parameter, group["momentum"]) for parameter in moved]
            mine = self._mine(moved)
            shapes: dict[torch.Size, list[int]] = defaultdict(list)
            for index in mine:
                shapes[moved[index].shape].append(index)
            for same in shapes.values():
                for index, update in zip(same, orthogonal(torch.stack([updates[i] for i in same])), strict=True):
                    updates[index] = update
            for index in set(range(len(moved))) - set(mine):
                updates[index] = torch.zeros_like(updates[index])
            self.team.add(updates)
            for parameter, update in zip(moved, updates, strict=True):
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return torch.lerp(parameter.grad, state["momentum"], momentum)

    def _mine(self, moved: list[nn.Parameter]) -> list[int]:
        """The matrices of this process: about as much work for each."""
        largest_first = sorted(range(len(moved)), key=lambda i: -moved[i].numel())
        return sorted(largest_first[place] for place in self.team.shares(len(moved)))


def optimizers(
    model: nn.Module, team: Team | None = None, matrix_lr: float = 0.02, other_lr: float = 0.003
) -> list[torch.optim.Optimizer]:
    """Muon for matrices of at least 16 rows that are no embedding, Adam for the rest."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and min(parameter.shape) >= 16 and "embed_tokens" not in name
        (matrices if inner else others).append(parameter)
    return [
        Muon(matrices, matrix_lr, decay=0.05, team=team),
        torch.optim.Adam(others, other_lr, betas=(0.9, 0.98), eps=1e-9),
    ]
