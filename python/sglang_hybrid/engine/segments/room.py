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
from sglang_hybrid.segment.blocks import Blocks, Numbering
from sglang_hybrid.segment.source import PooledBlocks

if TYPE_CHECKING:
    from sglang_hybrid.engine.pools.arena import Arena


@dataclass(frozen=True, slots=True)
class Room:
    """`data` are bytes, in which block b of `blocks` begins at b * `block_bytes`."""

    data: Tensor
    blocks: Blocks
    block_bytes: int


def fixed(total_bytes: int, device: torch.device, state_bytes: int, token_bytes: int) -> Room:
    """`total_bytes` for blocks of one entry's states or KV of tokens. Raises ConfigError if that is not two blocks."""
    tokens = max(1, -(-state_bytes // token_bytes))
    count = total_bytes // (tokens * token_bytes)
    if count < 2:
        raise ConfigError(
            f"segments need at least {2 * tokens * token_bytes / 1e9:.3f} GB, one block for states and one for KV; "
            f"raise --hybrid-segment-memory-gb: {total_bytes / 1e9:.3f}"
        )
    data = torch.zeros(count * tokens * token_bytes, dtype=torch.uint8, device=device)
    return Room(data, Blocks(count, tokens), tokens * token_bytes)


def shared(arena: Arena, limit_bytes: int, state_bytes: int, token_bytes: int) -> Room:
    """Addresses for `limit_bytes` of the budget, whose memory is had when a block is taken."""
    granule = arena.sizing.granule_bytes
    block_bytes = slot_bytes(max(state_bytes, token_bytes), granule)
    layout = segment_layout(block_bytes, granule, limit_bytes)
    supply, first_plane = arena.open(layout)
    size = layout.plane_granules[0] * granule
    data = bytes_at(arena.pooled.address(first_plane), size, arena.device, owner=arena.pooled)
    unit, tokens = math.gcd(block_bytes, token_bytes), block_bytes // token_bytes
    numbering = Numbering(block_bytes // unit, token_bytes // unit)
    return Room(data, Blocks(layout.pages, tokens, PooledBlocks(supply), numbering, least_of(tokens)), block_bytes)


def least_of(block_tokens: int) -> int:
    """Tokens that have to find room in a block that holds KV, or it is left alone: half of what it holds."""
    return max(1, block_tokens // 2)


def most_granules(state_bytes: int, token_bytes: int, tokens: int, granule_bytes: int) -> int:
    """Granules that one entry of `tokens` keeps in use at most beside block 0, each block in a column of its own."""
    block_bytes = slot_bytes(max(state_bytes, token_bytes), granule_bytes)
    block_tokens = block_bytes // token_bytes
    blocks = Blocks(0, block_tokens, least=least_of(block_tokens)).most_blocks(tokens)
    return (2 + blocks) * -(-block_bytes // granule_bytes)
