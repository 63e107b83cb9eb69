"""Linear recurrences one token at a time, and random inputs for them: what the operations are tested against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

FAMILIES = ("gdn", "kda", "mamba2", "gla")


@dataclass(frozen=True)
class Tokens:
    """Packed sequences of a family: k [T, HK, K], v [T, HV, V], log decay g [T, HV(, K)], beta [T, HV]."""

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    cu_seqlens: Tensor
    delta: bool

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return list(pairwise(self.cu_seqlens.tolist()))

    def to(self, dtype: torch.dtype) -> Tokens:
        return replace(self, **{name: getattr(self, name).to(dtype) for name in ("k", "v", "g", "beta")})

    def cut(self, *bounds: tuple[int, int]) -> Tokens:
        """The given runs of packed tokens as sequences of their own."""
        index = torch.cat([torch.arange(lo, hi) for lo, hi in bounds])
        lengths = torch.tensor([0] + [hi - lo for lo, hi in bounds])
        picked = {name: getattr(self, name)[index] for name in ("k", "v", "g", "beta")}
        return replace(self, **picked, cu_seqlens=lengths.cumsum(0))


def tokens(
    family: str, lengths: list[int], heads: int = 2, key_heads: int = 1, dv: int = 8, dk: int = 8, seed: int = 0
) -> Tokens:
    """Random float64 tokens; heads go from no decay at all to a fast one."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    total = sum(lengths)
    k = torch.nn.functional.normalize(randn(total, key_heads, dk), dim=-1)
    speed = torch.linspace(0.0, 0.3, heads, dtype=torch.float64) if heads > 1 else torch.full((1,), 0.05).double()
    diagonal = family in ("kda", "gla")
    g = -speed.view(1, heads, 1) * randn(total, heads, dk if diagonal else 1).abs()
    beta = torch.sigmoid(randn(total, heads))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return Tokens(
        k, randn(total, heads, dv), g if diagonal else g.squeeze(-1), beta, cu_seqlens, family in ("gdn", "kda")
    )


def step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, delta: bool) -> Tensor:
    """S [HV, V, K] after one token: k [HV, K], v [HV, V], g [HV(, K)], beta [HV]."""
    state = state * g.exp().reshape(g.shape[0], 1, -1)
    if delta:
        v = v - torch.einsum("hvk,hk->hv", state, k)
    return state + torch.einsum("hv,hk,h->hvk", v, k, beta)


def recurrence(family: str, state: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The state [heads, V, K] behind some tokens, one after the other; decay per head, with one number or K."""
    key = key.repeat_interleave(state.shape[0] // key.shape[1], 1)
    for k, v, g, b in zip(key, value, decay, beta, strict=True):
        state = state * (g.exp()[:, None, :] if g.dim() == 2 else g.exp()[:, None, None])
        if family in ("gdn", "kda"):
            v = b[:, None] * (v - (state @ k[:, :, None]).squeeze(-1))
        state = state + v[:, :, None] * k[:, None, :]
    return state


def run(some: Tokens, sequence: int, initial: Tensor | None = None) -> list[Tensor]:
    """States [HV, V, K] of a sequence after 0, 1, 2, ... tokens."""
    heads, dv = some.v.shape[1:]
    k = some.k.repeat_interleave(heads // some.k.shape[1], 1)
    lo, hi = some.bounds[sequence]
    states = [torch.zeros(heads, dv, k.shape[2], dtype=some.v.dtype) if initial is None else initial]
    for t in range(lo, hi):
        states.append(step(states[-1], k[t], some.v[t], some.g[t], some.beta[t], some.delta))
    return states


def chunk_starts(some: Tokens, states: list[list[Tensor]], chunk: int = 64) -> Tensor:
    """[chunks, HV, V, K], sequence by sequence, from the states that `run` returned for every sequence."""
    starts = [states[i][t] for i, (lo, hi) in enumerate(some.bounds) for t in range(0, hi - lo, chunk)]
    return torch.stack(starts) if starts else some.v.new_zeros(0, *some.v.shape[1:], some.k.shape[2])
