"""Cuts packed sequences into chunks and orders them so that a recurrence runs over all sequences at once.

Chunks are listed wave by wave: wave w holds the w-th chunk of every sequence that has one, longest sequences first. The
sequences alive in wave w are therefore a prefix of those alive in wave w - 1, and a recurrence needs only slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

CHUNK = 64
"""Tokens per chunk, counted from the start of each sequence; SGLang's grid for the checkpoints of GDN layers."""


@dataclass(frozen=True)
class ChunkPlan:
    """Where the chunks of a packed batch lie; `bounds` are the cumulative lengths, `length` the tokens per chunk."""

    bounds: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, bounds: list[int], length: int = CHUNK) -> ChunkPlan:
        """A plan with chunks of `length`, or of the longest sequence if that is shorter."""
        longest = max((hi - lo for lo, hi in pairwise(bounds)), default=0)
        return cls(tuple(bounds), max(1, min(length, longest)))

    @cached_property
    def counts(self) -> list[int]:
        """Chunks of each sequence."""
        return [-(-(hi - lo) // self.length) for lo, hi in pairwise(self.bounds)]

    @cached_property
    def order(self) -> list[int]:
        """Sequences that have tokens, most chunks first: the order of rows inside a wave."""
        return sorted((i for i, n in enumerate(self.counts) if n), key=lambda i: -self.counts[i])

    @cached_property
    def widths(self) -> list[int]:
        """Sequences alive in each wave; never increases."""
        waves = max(self.counts, default=0)
        return [sum(self.counts[i] > w for i in self.order) for w in range(waves)]

    @cached_property
    def offsets(self) -> list[int]:
        """Index of each wave's first chunk; the last entry is the number of chunks."""
        return list(accumulate(self.widths, initial=0))

    @property
    def chunks(self) -> int:
        return self.offsets[-1]

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    @cached_property
    def ranks(self) -> dict[int, int]:
        """Row of each sequence inside its waves."""
        return {sequence: rank for rank, sequence in enumerate(self.order)}

    def chunk_index(self, sequence: int, chunk: int) -> int:
        """Index of a sequence's `chunk`-th chunk in wave order."""
        return self.offsets[chunk] + self.ranks[sequence]

    @cached_property
    def in_sequence_order(self) -> Tensor:
        """[chunks] indices that bring per-chunk results from wave order into sequence order."""
        return torch.tensor([self.chunk_index(i, c) for i, n in enumerate(self.counts) for c in range(n)])

    @cached_property
    def _sources(self) -> Tensor:
        """[chunks * length] packed token behind each padded position; `tokens` where there is none."""
        starts = [self.bounds[i] + w * self.length for w, n in enumerate(self.widths) for i in self.order[:n]]
        ends = [self.bounds[i + 1] for n in self.widths for i in self.order[:n]]
        positions = torch.tensor(starts)[:, None] + torch.arange(self.length)
        return positions.masked_fill_(positions >= torch.tensor(ends)[:, None], self.tokens).flatten()

    @cached_property
    def _places(self) -> Tensor:
        """[tokens] padded position of each packed token."""
        places = torch.empty(self.tokens + 1, dtype=torch.int64)
        places[self._sources] = torch.arange(self._sources.numel())
        return places[:-1]

    def scatter(self, x: Tensor) -> Tensor:
        """[tokens, ...] packed -> [chunks, length, ...] float32 in wave order, zero where there is no token."""
        padded = x.new_zeros((self.chunks * self.length, *x.shape[1:]), dtype=torch.float32)
        if len(self.order) == 1:
            padded[: self.tokens] = x
        else:
            padded[self._places] = x.float()
        return padded.view(self.chunks, self.length, *x.shape[1:])

    def gather(self, x: Tensor) -> Tensor:
        """[chunks, length, ...] in wave order -> [tokens, ...] packed."""
        flat = x.reshape(self.chunks * self.length, *x.shape[2:])
        return flat[: self.tokens] if len(self.order) == 1 else flat.index_select(0, self._places)
