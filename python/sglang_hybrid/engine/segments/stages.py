"""The stages of a chunked linear layer around `chunk_h_jump`, in PyTorch on any device.

A layer is a recurrence, read by o = S q: S <- exp(g) S (I - beta k k^T) + beta v k^T for the delta rule, and for
Mamba-2, where v is dt x, k is B and q is C, S <- exp(g) S + v k^T. `before` brings chunks into WY form, `chunk_h_jump`
carries the state through them, `behind` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

_LEAST_DECAY = -80.0
"""e^-80 is nothing next to any state."""


@dataclass(frozen=True)
class Chunks:
    """Rows with these `bounds` cut into chunks of `size` tokens, row after row, as `chunk_h_jump` counts them."""

    bounds: tuple[int, ...]
    size: int
    device: torch.device

    @property
    def count(self) -> int:
        """Chunks of all rows."""
        return len(self._source)

    @cached_property
    def _source(self) -> Tensor:
        """[chunks, size] token of each place, the number of tokens where there is none."""
        starts = [
            at for low, high in zip(self.bounds, self.bounds[1:], strict=False) for at in range(low, high, self.size)
        ]
        ends = [
            high for low, high in zip(self.bounds, self.bounds[1:], strict=False) for _ in range(low, high, self.size)
        ]
        places = np.array(starts, np.int64)[:, None] + np.arange(self.size)
        places[places >= np.array(ends, np.int64)[:, None]] = self.bounds[-1]
        return torch.from_numpy(places).to(self.device)

    @cached_property
    def _place(self) -> Tensor:
        """[tokens] place of each token."""
        places = self._source.new_empty(self.bounds[-1] + 1)
        places[self._source.flatten()] = torch.arange(self._source.numel(), device=self.device)
        return places[:-1]

    def cut(self, x: Tensor) -> Tensor:
        """[tokens, ...] -> [chunks, size, ...], zero where there is no token."""
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[self._source]

    def joined(self, x: Tensor) -> Tensor:
        """[chunks, size, ...] -> [tokens, ...]."""
        return x.flatten(0, 1)[self._place]


@dataclass(frozen=True, slots=True)
class Cut:
    """A layer's tokens in chunks: q, k [chunks, key heads, 1, size, K], total and decay by head: [chunks, key heads,
    heads per key head, size, 1] and [.., size, size]; `w` and `u` [tokens, heads, .] as `chunk_h_jump` takes them."""

    q: Tensor
    k: Tensor
    total: Tensor
    decay: Tensor
    w: Tensor | None
    u: Tensor
    g: Tensor


def before(chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Cut:
    """q, k [tokens, key heads, K], v [tokens, heads, V], g (log decay) and beta [tokens, heads], all float32."""
    key_heads, heads = k.shape[1], v.shape[1]
    each = heads // key_heads
    q_cut, k_cut = (chunks.cut(x).transpose(1, 2).unsqueeze(2) for x in (q, k))
    total = _by_head(chunks.cut(g).cumsum(1).unsqueeze(-1), key_heads, each)
    decay = (total - total.mT).clamp_(_LEAST_DECAY, 0.0).exp_()
    if beta is None:
        return Cut(q_cut, k_cut, total, decay, None, v, chunks.joined(_by_token(total))[..., 0])
    strength = _by_head(chunks.cut(beta).unsqueeze(-1), key_heads, each)
    mixed = (k_cut @ k_cut.mT * decay).mul_(strength)
    values = _by_head(chunks.cut(v), key_heads, each)
    sides = torch.cat([strength * values, (strength * total.exp()) * k_cut], -1)
    solved = torch.linalg.solve_triangular(mixed, sides, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[2], k.shape[2]], -1)
    w, u, ends = (chunks.joined(_by_token(x)) for x in (w, u, total))
    return Cut(q_cut, k_cut, total, decay, w, u, ends[..., 0])


def behind(chunks: Chunks, cut: Cut, h: Tensor, v_new: Tensor) -> Tensor:
    """The layer's output [tokens, heads, V] from the states before its chunks, h [chunks, heads, V, K]."""
    count, key_heads, each = cut.total.shape[:3]
    states = h.view(count, key_heads, each, *h.shape[2:])
    values = _by_head(chunks.cut(v_new), key_heads, each)
    read = (cut.q * cut.total.exp()) @ states.mT
    inner = (cut.q @ cut.k.mT * cut.decay).tril_() @ values
    return chunks.joined(_by_token(read + inner))


def _by_head(x: Tensor, key_heads: int, each: int) -> Tensor:
    """[chunks, size, heads, n] -> [chunks, key heads, heads per key head, size, n]."""
    return x.unflatten(2, (key_heads, each)).permute(0, 2, 3, 1, 4)


def _by_token(x: Tensor) -> Tensor:
    """[chunks, key heads, heads per key head, size, n] -> [chunks, size, heads, n]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)
