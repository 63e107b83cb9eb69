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

    def blocks(self, chunks: int) -> list[tuple[int, int, list[int]]]:
        """Runs of whole waves with about `chunks` chunks: first and last chunk, and the widths up to the wave after."""
        blocks, first = [], 0
        for wave in range(1, len(self.widths) + 1):
            if wave == len(self.widths) or self.offsets[wave + 1] - self.offsets[first] > chunks:
                widths = [*self.widths[first:wave], self.widths[wave] if wave < len(self.widths) else 0]
                blocks.append((self.offsets[first], self.offsets[wave], widths))
                first = wave
        return blocks

    @property
    def is_in_sequence_order(self) -> bool:
        """Whether wave order and sequence order are the same."""
        return len(self.order) == 1 or (len(self.widths) == 1 and self.order == sorted(self.order))

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

    def padded(self, x: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Chunks first to last of x [tokens, ...] as [chunks, length, ...] float32, zero where there is no token."""
        last = self.chunks if last is None else last
        lo, hi = first * self.length, last * self.length
        out = x.new_empty((hi - lo, *x.shape[1:]), dtype=torch.float32)
        if len(self.order) == 1:
            real = min(hi, self.tokens) - lo
            out[:real] = x[lo : lo + real]
            out[real:] = 0.0
        else:
            sources = self._sources[lo:hi]
            out.copy_(x.index_select(0, sources.clamp(max=self.tokens - 1)))
            out[sources == self.tokens] = 0.0
        return out.view(last - first, self.length, *x.shape[1:])

    def packed(self, x: Tensor) -> Tensor:
        """[chunks, length, ...] in wave order -> [tokens, ...] as they came."""
        flat = x.flatten(0, 1)
        return flat[: self.tokens] if len(self.order) == 1 else flat.index_select(0, self._places)
