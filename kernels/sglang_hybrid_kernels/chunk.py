"""Linear recurrences over one chunk of tokens, in matrix products: what the naive paths share.

State S [V, K] (V-first). One token: S <- S diag(exp(g)) + value k^T. The additive rule (Mamba2, GLA) has value =
beta v, the delta rule (GDN, KDA) value = beta (v - S diag(exp(g)) k). g is one number per head (Mamba2, GDN) or one per
key channel (GLA, KDA). Sources: Dao and Gu 2024 (arXiv 2405.21060) section 6; Yang et al. 2024 (arXiv 2412.06464)
section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
"""Tokens per chunk, counted from the start of each sequence."""

NORM_EPSILON = 1e-6


def precision(*tensors: Tensor | None) -> torch.dtype:
    """What to compute in: float64 if any input has it, else float32."""
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def normalised(k: Tensor) -> Tensor:
    """k [..., K] with unit length."""
    return k * (k.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()


def running_decay(g: Tensor) -> Tensor:
    """g [..., C, 1 or K] summed over the tokens so far, each included."""
    return g.cumsum(-2)


def values(k: Tensor, v: Tensor, total: Tensor, beta: Tensor, states: Tensor) -> Tensor:
    """What the delta rule writes: [..., C, V].

    k [..., C, K], v [..., C, V], running decay total [..., C, 1 or K], beta [..., C, 1], states before the chunk
    [..., V, K]. With A[i, j] = beta_i sum_c exp(total_i - total_j)_c k_ic k_jc for j < i, they solve
    (I + A) X = beta (v - (exp(total) k) S^T).
    """
    rhs = beta * (v - (total.exp() * k) @ states.mT)
    return torch.linalg.solve_triangular(_interaction(k, total) * beta, rhs, upper=False, unitriangular=True)


def operators(k: Tensor, v: Tensor, total: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """(W [..., C, K], U [..., C, V]): the delta rule's values are U - W S^T, for any state before the chunk."""
    rhs = torch.cat([beta * total.exp() * k, beta * v], -1)
    solved = torch.linalg.solve_triangular(_interaction(k, total) * beta, rhs, upper=False, unitriangular=True)
    return solved[..., : k.shape[-1]].contiguous(), solved[..., k.shape[-1] :].contiguous()


def _interaction(k: Tensor, total: Tensor) -> Tensor:
    """[..., C, C]: sum_c exp(total_i - total_j)_c k_ic k_jc below the diagonal, of no meaning elsewhere."""
    if total.shape[-1] == 1:
        return (k @ k.mT) * (total - total.mT).clamp(max=0.0).exp()
    decay = (total.unsqueeze(-2) - total.unsqueeze(-3)).clamp_(max=0.0).exp_()
    return torch.einsum("...ic,...jc,...ijc->...ij", k, k, decay)


def advanced(states: Tensor, k: Tensor, written: Tensor, total: Tensor) -> Tensor:
    """The state [..., V, K] after the chunk, from the one before it and the written values [..., C, V]."""
    fading = (total[..., -1:, :] - total).exp() * k
    return states * total[..., -1:, :].exp() + written.mT @ fading
