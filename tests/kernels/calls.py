"""A small valid call of every operation: what tests of all operations vary. All tensors are dense and float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

LAYERS, SLOTS, HEADS, V, K = 2, 5, 2, 16, 16


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def packed(tokens: int, by_channel: bool) -> dict[str, Tensor]:
    decay = randn(tokens, HEADS, *[K] * by_channel, seed=3).abs() * -0.1
    return {
        "k": normalize(randn(tokens, 1, K, seed=1), dim=-1),
        "v": randn(tokens, HEADS, V, seed=2),
        "g": decay,
        "beta": randn(tokens, HEADS, seed=4).sigmoid(),
    }


def copy_slots() -> dict[str, Any]:
    pools = [randn(LAYERS, SLOTS, HEADS, V, K, seed=0), randn(LAYERS, SLOTS, 6, 3, seed=1).bfloat16()]
    return {"pools": pools, "source": ints(1, 3, 2), "destination": ints(2, 0, 4)}


def copy_slots_into_int8() -> dict[str, Any]:
    return {
        "pools": [randn(LAYERS, SLOTS, HEADS, V, K, seed=0)],
        "into": [torch.zeros(LAYERS, SLOTS, HEADS, V, K, dtype=torch.int8)],
        "into_scales": [torch.zeros(LAYERS, SLOTS, HEADS, 1, K)],
        "source": ints(1, 3, 2),
        "destination": ints(2, 0, 4),
    }


def state_at(delta: bool, by_channel: bool) -> dict[str, Any]:
    return {
        "h": randn(4, HEADS, V, K, seed=5) * 0.1,
        **packed(50, by_channel),
        "cu_seqlens": ints(0, 12, 50),
        "sequence": ints(1, 0, 1),
        "position": ints(5, 7, 38),
        "into": torch.zeros(SLOTS, HEADS, V, K),
        "slots": ints(3, 1, 4),
        "delta": delta,
        "chunk": 16,
    }


def conv_window_at() -> dict[str, Any]:
    return {
        "x": randn(20, 6, seed=1),
        "cu_seqlens": ints(0, 8, 20),
        "sequence": ints(0, 1, 1),
        "position": ints(1, 2, 9),
        "into": torch.zeros(SLOTS, 6, 3),
        "slots": ints(3, 1, 4),
        "initial": randn(SLOTS, 6, 3, seed=2),
        "initial_slots": ints(2, 4),
    }


def chunk_transition(delta: bool, by_channel: bool) -> dict[str, Any]:
    tail = [K, K] if delta else [K] if by_channel else []
    return {
        **packed(30, by_channel),
        "cu_seqlens": ints(0, 12, 30),
        "entries": ints(3, 1),
        "end_state": torch.zeros(SLOTS, HEADS, V, K),
        "transition": torch.zeros(SLOTS, HEADS, *tail),
        "vanishing": torch.zeros(SLOTS, HEADS, dtype=torch.bool),
        "vanishing_below": 0.2,
        "initial": randn(3, HEADS, V, K, seed=6),
        "initial_slots": ints(2, 1),
        "delta": delta,
    }


def operators(family: str, *lead: int) -> dict[str, Tensor]:
    """Four entries; dense ones have eight bits, and in the family "rows" their transitions are in a pool of 5 rows."""
    front, names = (*lead, 4, HEADS), ("transition", "end_state")
    if family in ("dense", "rows"):
        fronts = {"transition": (5,) if family == "rows" else front, "end_state": front}
        tails = {"transition": (K, K), "end_state": (V, K)}
        made = {n: (randn(*fronts[n], *tails[n], seed=i) * 40).to(torch.int8) for i, n in enumerate(names)}
        made |= {f"{n}_scale": randn(*fronts[n], K, seed=i + 2).abs() * 0.003 for i, n in enumerate(names)}
    else:
        shape = (*front, K) if family == "diagonal" else front
        made = {"transition": randn(*shape, seed=0).sigmoid(), "end_state": randn(*front, V, K, seed=1)}
    if family == "rows":
        made["transition_rows"] = torch.randint(-1, 5, front, generator=torch.Generator().manual_seed(7))
    return made


def compose(family: str, groups: int = 1) -> dict[str, Any]:
    return {
        "pool": randn(LAYERS, SLOTS, HEADS, V, K, seed=5),
        "source": ints(1, -1, 2),
        "destination": ints(3, 0, 4),
        "chain": ints(2, 0, 3, 1, 2),
        "chain_offsets": ints(0, 2, 3, 5),
        **operators(family, LAYERS),
        "tree_groups": groups,
    }


def chunk_h_jump(by_channel: bool, family: str = "dense") -> dict[str, Any]:
    made = packed(40, by_channel)
    return {
        "k": normalize(randn(40, HEADS, K, seed=1), dim=-1) if by_channel else made["k"],
        "w": randn(40, HEADS, K, seed=8) * 0.1,
        "u": made["v"],
        "g": made["g"],
        "state": randn(SLOTS, HEADS, V, K, seed=5),
        "slots": ints(3, 1),
        "cu_seqlens": ints(0, 10, 22, 40),
        "request_rows": ints(0, 2, 3),
        "jump": ints(2, -1, 1),
        **operators(family),
        "chunk_size": 16,
    }


def rerotate_scatter() -> dict[str, Any]:
    names = ("source_k", "destination_k", "source_v", "destination_v")
    pools = {name: list(randn(LAYERS, 9, HEADS, K, seed=i)) for i, name in enumerate(names)}
    return {
        **pools,
        "source": ints(1, 3, 2, 7),
        "destination": ints(2, 0, 4, 8),
        "delta": ints(5, -3),
        "segment_offsets": ints(0, 1, 4),
        "inverse_frequencies": 10.0 ** -torch.arange(4.0),
    }


def seam_attention() -> dict[str, Any]:
    return {
        "q": randn(5, 4, 16, seed=1),
        "k": randn(24, HEADS, 16, seed=2),
        "v": randn(24, HEADS, 16, seed=3),
        "pages": ints(4, 1, 11, 3, 7, 2),
        "page_offsets": ints(0, 2, 6),
        "positions": ints(3, 1, 7, 2, 5),
        "query_offsets": ints(0, 2, 5),
        "page_size": 2,
    }


def tree() -> dict[str, Any]:
    return {
        "k": normalize(randn(2, 4, 1, K, seed=2), dim=-1),
        "g": -0.3 * randn(2, 4, HEADS, seed=4).abs(),
        "parent": torch.tensor([[-1, 0, 1, 0], [-1, -1, 1, 2]]),
    }


def state_verify() -> dict[str, Any]:
    return {
        **tree(),
        "q": normalize(randn(2, 4, 1, K, seed=1), dim=-1),
        "v": randn(2, 4, HEADS, V, seed=3),
        "beta": randn(2, 4, HEADS, seed=5).sigmoid(),
        "pool": randn(SLOTS, HEADS, V, K, seed=6),
        "slots": ints(3, 1),
        "scale": 0.7,
    }


def promote_path() -> dict[str, Any]:
    made = {name: x if name == "parent" else torch.stack([x, x * 0.9]) for name, x in tree().items()}
    return {
        **made,
        "pool": randn(LAYERS, SLOTS, HEADS, V, K, seed=6),
        "values": randn(LAYERS, 2, 4, HEADS, V, seed=3),
        "source": ints(3, 1),
        "destination": ints(4, 1),
        "accepted": ints(2, 3),
    }


def promote_window() -> dict[str, Any]:
    return {
        "pool": randn(LAYERS, SLOTS, 6, 3, seed=6),
        "inputs": randn(LAYERS, 2, 4, 6, seed=7),
        "parent": tree()["parent"],
        "source": ints(3, 1),
        "destination": ints(4, 1),
        "accepted": ints(3, 2),
    }


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "copy_slots": ("copy_slots", copy_slots()),
    "copy_slots to int8": ("copy_slots", copy_slots_into_int8()),
    "state_at gdn": ("state_at", state_at(True, False)),
    "state_at kda": ("state_at", state_at(True, True)),
    "state_at mamba2": ("state_at", state_at(False, False)),
    "conv_window_at": ("conv_window_at", conv_window_at()),
    "chunk_transition gdn": ("chunk_transition", chunk_transition(True, False)),
    "chunk_transition gla": ("chunk_transition", chunk_transition(False, True)),
    "compose dense": ("compose", compose("dense")),
    "compose dense in groups": ("compose", compose("dense", 2)),
    "compose by rows": ("compose", compose("rows")),
    "compose by rows in groups": ("compose", compose("rows", 2)),
    "compose diagonal": ("compose", compose("diagonal")),
    "chunk_h_jump gdn": ("chunk_h_jump", chunk_h_jump(False)),
    "chunk_h_jump gdn by rows": ("chunk_h_jump", chunk_h_jump(False, "rows")),
    "chunk_h_jump kda": ("chunk_h_jump", chunk_h_jump(True)),
    "rerotate_scatter": ("rerotate_scatter", rerotate_scatter()),
    "seam_attention": ("seam_attention", seam_attention()),
    "state_verify": ("state_verify", state_verify()),
    "promote_path": ("state_verify:promote_path", promote_path()),
    "promote_window": ("state_verify:promote_window", promote_window()),
}
"""Name -> (operation as the interpreter fixture calls it, arguments)."""
