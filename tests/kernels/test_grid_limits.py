"""Calls with more programs than a launch takes are refused before anything runs, with what to do."""

import copy
from typing import Any

import pytest
import torch

from sglang_hybrid_kernels.arguments import LARGEST_GRID
from tests.kernels.calls import CALLS, LAYERS

MANY = LARGEST_GRID + 1


def repeated(given: dict[str, Any], dim: int, *names: str) -> dict[str, Any]:
    """The same items again and again: MANY of them."""
    return {name: given[name].index_select(dim, torch.arange(MANY) % given[name].shape[dim]) for name in names}


def state_at(given: dict[str, Any]) -> dict[str, Any]:
    return repeated(given, 0, "sequence", "position", "slots")


def chunk_transition(given: dict[str, Any]) -> dict[str, Any]:
    bounds = torch.cat([torch.zeros(MANY, dtype=torch.int64), given["cu_seqlens"][-1:]])
    return {"cu_seqlens": bounds, **repeated(given, 0, "entries", "initial_slots")}


def rerotate_scatter(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name][:1] * MANY for name in ("source_k", "destination_k", "source_v", "destination_v")}


def state_verify(given: dict[str, Any]) -> dict[str, Any]:
    return repeated(given, 0, "q", "k", "v", "g", "beta", "slots", "parent")


def promote(given: dict[str, Any]) -> dict[str, Any]:
    by_layer = [name for name in ("k", "values", "g", "inputs") if name in given]
    return repeated(given, 1, *by_layer) | repeated(given, 0, "source", "destination", "accepted", "parent")


LIMITS = {
    "state_at gdn": (state_at, "positions", LARGEST_GRID),
    "conv_window_at": (state_at, "positions", LARGEST_GRID),
    "chunk_transition gdn": (chunk_transition, "segments", LARGEST_GRID),
    "rerotate_scatter": (rerotate_scatter, "layers", LARGEST_GRID),
    "seam_attention": (lambda _: {"longest": 2048 * MANY}, "keys of one request, in parts of 2048,", LARGEST_GRID),
    "state_verify": (state_verify, "requests", LARGEST_GRID),
    "promote_path": (promote, "requests", LARGEST_GRID // LAYERS),
    "promote_window": (promote, "requests", LARGEST_GRID // LAYERS),
}


@pytest.mark.parametrize("call", LIMITS)
def test_more_programs_than_a_launch_takes(interpreted: Any, call: str):
    enlarge, what, most = LIMITS[call]
    operation, given = CALLS[call]
    given = copy.deepcopy(given) | enlarge(given)
    before = copy.deepcopy(given)
    with pytest.raises(ValueError, match=f"split the call: Triton takes up to {most} {what} of .*: {MANY}"):
        interpreted(operation, **given, check_slots=False)
    for name, x in before.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(given[name], x), name
