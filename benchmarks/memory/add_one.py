"""A Triton kernel that adds one to every number; imported on a GPU only."""

import triton
import triton.language as tl


@triton.jit
def add_one(numbers, count, BLOCK: tl.constexpr):
    """Add one to the first `count` of `numbers` (float32)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(numbers + at, tl.load(numbers + at, mask=at < count) + 1.0, mask=at < count)
