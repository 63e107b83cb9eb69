"""From what a layer projects to the decay that the recurrences take."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def log_decay(raw: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None = None) -> Tensor:
    """Log decay by channel of Kimi delta attention (arXiv 2510.26692, section 3): raw [..., heads, K] to float32.

    A_log has one entry per head and dt_bias one per channel, in any shape: -exp(A_log) softplus(raw + dt_bias). With
    `lower_bound`, the safe gate of later models: lower_bound sigmoid(exp(A_log) (raw + dt_bias)).
    """
    raw = raw.float() if dt_bias is None else raw.float() + dt_bias.float().view(raw.shape[-2:])
    rate = A_log.float().reshape(-1, 1).exp()
    return F.softplus(raw).mul_(-rate) if lower_bound is None else (raw * rate).sigmoid_().mul_(lower_bound)


__all__ = ["log_decay"]
