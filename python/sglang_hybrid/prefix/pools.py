"""The pools that something can be evicted from, and what a victim is worth in each."""

from dataclasses import replace
from enum import Enum

from sglang_hybrid.core.spec import ModelSpec

AHEAD = 256
"""An eviction in our order frees a 256th of the pool beyond what was asked for: most requests and steps of decoding
then find what they need, and what an eviction costs before its first victim is spread over several of them."""


class PoolKind(Enum):
    """What is short: states or KV, where they are computed with or in the host tier, or bytes that both share."""

    STATES = "states"
    KV = "kv"
    HOST_STATES = "host_states"
    HOST_KV = "host_kv"
    BYTES = "bytes"

    __hash__ = object.__hash__  # Enum's own runs Python code, and every decision looks an index up


def priced(model: ModelSpec, pool: PoolKind) -> ModelSpec:
    """`model` with the bytes of what is not in `pool` at zero."""
    if pool is PoolKind.BYTES:
        return model
    if pool in (PoolKind.STATES, PoolKind.HOST_STATES):
        return replace(model, kv_bytes_per_token=0)
    return replace(model, checkpoint_bytes=0, conv_bytes=0)
