"""Muon for the matrices inside a network, Adam for everything else.

Muon (Jordan et al., 2024): the momentum of a matrix is replaced by the nearest orthogonal one, by five Newton-Schulz
steps, before it is applied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

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
    """Momentum 0.95 (Nesterov); matrices of one shape are taken together."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, decay: float = 0.0) -> None:
        super().__init__(list(parameters), {"lr": lr, "decay": decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.shape].append(parameter)
            for shape, same in shapes.items():
                updates = []
                for parameter in same:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(torch.lerp(parameter.grad, state["momentum"], group["momentum"]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(same, orthogonal(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * scale)


def optimizers(model: nn.Module, matrix_lr: float = 0.02, other_lr: float = 0.003) -> list[torch.optim.Optimizer]:
    """Muon for matrices of at least 16 rows that are no embedding, Adam for the rest."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and min(parameter.shape) >= 16 and "embed_tokens" not in name
        (matrices if inner else others).append(parameter)
    return [
        Muon(matrices, matrix_lr, decay=0.05),
        torch.optim.Adam(others, other_lr, betas=(0.9, 0.98), eps=1e-9),
    ]
