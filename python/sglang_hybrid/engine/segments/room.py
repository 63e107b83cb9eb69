"""Memory of blocks: a buffer of its own, or a third pool in the elastic budget of KV and states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.device.tensors import bytes_at
from sglang_hybrid.memory.sizing import segment_layout, slot_bytes
from sglang_hybrid.segment.blocks import Blocks
from sglang_hybrid.segment.slabs import Cut, Numbering
from sglang_hybrid.segment.source import PooledBlocks

if TYPE_CHECKING:
    from sglang_hybrid.engine.pools.arena import Arena


@dataclass(frozen=True, slots=True)
class Room:
    """`data` are bytes, in which block b of `blocks` begins at b * `block_bytes`."""

    data: Tensor
    blocks: Blocks
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on a rank of an entry's states, of each token's KV, and of each transition; and how many `transitions` an
    entry has until it is known which vanish."""

    state_bytes: int
    token_bytes: int
    transitions: int = 0
    transition_bytes: int = 0

    @property
    def largest(self) -> int:
        """Bytes that have to fit into a block."""
        return max(self.state_bytes, self.token_bytes, self.transition_bytes)

    def cuts(self, block_bytes: int, whole: bool) -> tuple[Cut, Cut]:
        """How a block is cut for KV, and how for transitions; `whole`: nothing of a block has memory while none has."""

        def cut(size: int) -> Cut:
            unit, slots = math.gcd(block_bytes, size), block_bytes // size
            # Memory comes and goes by blocks: of one that holds something, no less than half is taken at once.
            return Cut(slots, Numbering(block_bytes // unit, size // unit), max(1, slots // 2) if whole else 1)

        return cut(self.token_bytes), cut(self.transition_bytes or block_bytes)


def fixed(total_bytes: int, device: torch.device, needs: Needs) -> Room:
    """`total_bytes` for blocks. Raises ConfigError if they do not hold one entry."""
    block_bytes = -(-needs.largest // needs.token_bytes) * needs.token_bytes
    kv, transitions = needs.cuts(block_bytes, whole=False)
    blocks = Blocks(total_bytes // block_bytes, kv, transitions=transitions)
    if not blocks.ever_fit(1, needs.transitions):
        least = blocks.filled(1, 1, needs.transitions)
        raise ConfigError(
            f"segments need at least {least * block_bytes / 1e9:.3f} GB, blocks for the states of one and one for KV; "
            f"raise --hybrid-segment-memory-gb: {total_bytes / 1e9:.3f}"
        )
    data = torch.zeros(blocks.count * block_bytes, dtype=torch.uint8, device=device)
    return Room(data, blocks, block_bytes)


def shared(arena: Arena, limit_bytes: int, needs: Needs) -> Room:
    """Addresses for `limit_bytes` of the budget, whose memory is had when a block is taken."""
    granule = arena.sizing.granule_bytes
    block_bytes = slot_bytes(needs.largest, granule)
    layout = segment_layout(block_bytes, granule, limit_bytes)
    supply, first_plane = arena.open(layout)
    size = layout.plane_granules[0] * granule
    data = bytes_at(arena.pooled.address(first_plane), size, arena.device, owner=arena.pooled)
    kv, transitions = needs.cuts(block_bytes, whole=True)
    return Room(data, Blocks(layout.pages, kv, PooledBlocks(supply), transitions), block_bytes)


def most_granules(needs: Needs, tokens: int, granule_bytes: int) -> int:
    """Granules that one entry of `tokens` keeps in use at most beside block 0, each block in a column of its own."""
    block_bytes = slot_bytes(needs.largest, granule_bytes)
    kv, transitions = needs.cuts(block_bytes, whole=True)
    blocks = 2 + kv.most_blocks(tokens) + transitions.most_blocks(needs.transitions)
    return blocks * -(-block_bytes // granule_bytes)
