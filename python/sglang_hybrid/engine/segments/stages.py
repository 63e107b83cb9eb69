"""The stages of a chunked linear layer around `chunk_h_jump`, in PyTorch on any device.

A layer is a recurrence, read by o = S q: S <- S diag(exp(g)) (I - beta k k^T) + beta v k^T for delta rules, where g is
one number by head (gated delta rule) or by channel (Kimi delta attention), and for Mamba-2, where v is dt x, k is B and
q is C, S <- exp(g) S + v k^T. `before` brings chunks into WY form, `chunk_h_jump` carries the state through them,
`behind` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sglang_hybrid.engine.cpu.gdn import LEAST_DECAY, SPAN, chunk_products
from sglang_hybrid.engine.pools import copies

_ELEMENTS = 1 << 26
"""Of the temporary that decays by channel need, which has SPAN numbers for every channel of every token."""
_TURN_ELEMENTS = 1 << 28
"""Of all temporaries of a layer, 1 GiB. Short rows fill a part of their chunks only: those of many prompts that jump
from segment to segment would take up to 30 GB at once, which no pool leaves free."""


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
        return copies.send(places.ravel(), self.device).view(places.shape)

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
    """A layer's tokens in chunks: q [chunks, key heads, 1, size, K], by head the running decay `total` [chunks, key
    heads, heads per key head, size, 1 or K] and what queries find of the keys of their chunk, `inner` [.., size, size];
    `k`, `w`, `u` and `g` [tokens, heads, .] as `chunk_h_jump` takes them."""

    q: Tensor
    total: Tensor
    inner: Tensor
    k: Tensor
    w: Tensor | None
    u: Tensor
    g: Tensor


def turns(chunks: Chunks, key_heads: int, heads: int, value: int, key: int) -> Iterator[tuple[slice, slice]]:
    """Heads, and key heads of theirs, that are taken at once: a layer's heads know nothing of each other.

    A turn has the heads of whole key heads, or some of one.
    """
    each, size = heads // key_heads, chunks.size
    held = value * key + 4 * size * size + size * (8 * key + 5 * value)  # of one head and chunk, at the worst moment
    most = max(1, _TURN_ELEMENTS // (held * max(1, chunks.count)))
    together = most // each * each or max(n for n in range(1, most + 1) if each % n == 0)
    for begin in range(0, heads, together):
        end = min(begin + together, heads)
        yield slice(begin, end), slice(begin // each, -(-end // each))


def before(chunks: Chunks, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Cut:
    """q, k [tokens, key heads, K], v [tokens, heads, V], beta [tokens, heads] and the log decay g [tokens, heads] or
    [tokens, heads, K], all float32. With decay by channel every head has keys of its own."""
    key_heads, heads = k.shape[1], v.shape[1]
    each = heads // key_heads
    q_cut, k_cut = (chunks.cut(x).transpose(1, 2).unsqueeze(2) for x in (q, k))
    by_channel = g.dim() == 3
    total = _by_head(chunks.cut(g if by_channel else g.unsqueeze(-1)).cumsum(1), key_heads, each)
    if beta is None:
        decay = (total - total.mT).clamp_(LEAST_DECAY, 0.0).exp_()
        inner = (q_cut @ k_cut.mT * decay).tril_()
        return Cut(q_cut, total, inner, k, None, v, chunks.joined(_by_token(total))[..., 0])
    strength = _by_head(chunks.cut(beta).unsqueeze(-1), key_heads, each)
    among, inner = _products(q_cut, k_cut, total)
    mixed = among.mul_(strength)
    values = _by_head(chunks.cut(v), key_heads, each)
    sides = torch.cat([strength * values, (strength * total.exp()) * k_cut], -1)
    solved = torch.linalg.solve_triangular(mixed, sides, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[2], k.shape[2]], -1)
    w, u, ends = (chunks.joined(_by_token(x)) for x in (w, u, total))
    inner.tril_()
    if by_channel:
        fading = (total[..., -1:, :] - total).exp() * k_cut
        return Cut(q_cut, total, inner, chunks.joined(_by_token(fading)), w, u, ends)
    return Cut(q_cut, total, inner, k, w, u, ends[..., 0])


def _products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """`chunk_products`, by channel some chunks at a time."""
    count, heads, _, size, channels = total.shape
    if channels == 1:
        return chunk_products(q, k, total)
    some = max(1, _ELEMENTS // (heads * size * SPAN * channels))
    found = [chunk_products(*(x[at : at + some] for x in (q, k, total))) for at in range(0, count, some)]
    among, inner = (torch.cat(parts) for parts in zip(*found, strict=True))
    return among, inner


def behind(chunks: Chunks, cut: Cut, h: Tensor, v_new: Tensor) -> Tensor:
    """The layer's output [tokens, heads, V] from the states before its chunks, h [chunks, heads, V, K]."""
    count, key_heads, each = cut.total.shape[:3]
    states = h.view(count, key_heads, each, *h.shape[2:])
    values = _by_head(chunks.cut(v_new), key_heads, each)
    read = (cut.q * cut.total.exp()) @ states.mT
    return chunks.joined(_by_token(read + cut.inner @ values))


def _by_head(x: Tensor, key_heads: int, each: int) -> Tensor:
    """[chunks, size, heads, n] -> [chunks, key heads, heads per key head, size, n]."""
    return x.unflatten(2, (key_heads, each)).permute(0, 2, 3, 1, 4)


def _by_token(x: Tensor) -> Tensor:
    """[chunks, key heads, heads per key head, size, n] -> [chunks, size, heads, n]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)
