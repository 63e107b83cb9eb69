"""compose and chunk_h_jump with transitions in a pool of rows: the bits of a matrix for every entry and head."""

import copy
import importlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.calls import CALLS, K, randn

OPERATIONS = {
    "compose": "compose dense",
    "compose in groups": "compose dense in groups",
    "chunk_h_jump": "chunk_h_jump gdn",
}
"""Name here -> name of the dense call."""
MATRICES, GONE = 5, -3
PARTS = {"side by side": 1, "in quarters": 4, "in sixteenths": 16}
"""The unit in which rows are numbered, as a part of a row."""


def laid(values: Tensor, at: Tensor, parts: int) -> Tensor:
    """A pool with values[i] at row at[i]; a row begins at every part of a row. What is in no value is poison, also
    before the pool, where row GONE would be."""
    unit, rows = values[0].numel() // parts, int(at.max()) + 2
    poison = torch.nan if values.is_floating_point() else 99
    room = values.new_full(((rows - 1 - GONE) * unit + values[0].numel(),), poison)
    pool = room.as_strided((rows, *values.shape[1:]), (unit, *values[0].stride()), -GONE * unit)
    for row, value in zip(at.tolist(), values, strict=True):
        pool[row] = value
    return pool


def both(kind: torch.dtype, layout: str, *front: int, index: torch.dtype = torch.int64) -> tuple[Any, Any]:
    """Random transitions of [layers,] entries, heads: in a pool, out of order and some of them shared, and dense."""
    generator = torch.Generator().manual_seed(1)
    matrices, scale = randn(MATRICES, K, K, seed=2) / K**0.5, None
    if kind is torch.int8:
        scale = matrices.abs().amax(-2) / 127
        matrices = (matrices / scale[:, None]).round()
    matrices = matrices.to(kind)
    which = torch.randint(-1, MATRICES, front, generator=generator)
    gone, parts = which < 0, PARTS[layout]
    at = torch.randperm(MATRICES, generator=generator) * (parts + 1) + 1  # a part is free before each
    rows = at[which].masked_fill(gone, GONE).to(index)
    assert gone.any()
    assert rows.unique().numel() < rows.numel() - int(gone.sum())
    pool = {"transition": laid(matrices, at, parts), "transition_rows": rows}
    dense = {"transition": matrices[which].masked_fill(gone[..., None, None], 0)}
    if scale is not None:
        pool["transition_scale"], dense["transition_scale"] = laid(scale, at, parts), scale[which]
    return pool, dense


def call(operation: str, run: Any, changed: dict[str, Any]) -> list[Tensor]:
    """What the operation returns, and the states it leaves."""
    name, given = CALLS[OPERATIONS[operation]]
    given = copy.deepcopy(given)
    del given["transition"], given["transition_scale"]
    given |= changed
    result = run(name, **given)
    return [*(result or ()), given["pool" if name == "compose" else "state"]]


def naive(name: str, **given: Any) -> Any:
    return getattr(importlib.import_module(f"sglang_hybrid_kernels.{name}"), name)(**given)


def front(operation: str) -> tuple[int, ...]:
    return CALLS[OPERATIONS[operation]][1]["end_state"].shape[:-2]


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("layout", PARTS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_give_the_bits_of_dense_transitions(
    interpreted: Any, operation: str, kind: torch.dtype, layout: str, backend: str
):
    run = naive if backend == "naive" else interpreted
    pool, dense = both(kind, layout, *front(operation))
    got, want = (call(operation, run, transitions) for transitions in (pool, dense))
    assert all(x.isfinite().all() for x in got)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    if kind is torch.bfloat16:
        narrow, _ = both(kind, layout, *front(operation), index=torch.int32)
        trusted = call(operation, run, narrow | {"check_slots": False})
        assert all(torch.equal(x[: y.shape[0]], y) for x, y in zip(trusted, want, strict=True))


@pytest.mark.parametrize("groups", [1, 2])
def test_segments_without_a_transition_at_every_place_of_a_chain(interpreted: Any, groups: int):
    """Head h of 8 has no transition at the places that the bits of h say."""
    gone = (torch.arange(8) >> torch.arange(3)[:, None]) % 2 == 1
    matrices, end_state = randn(24, K, K, seed=1) / K**0.5, randn(1, 3, 8, 20, K, seed=2)
    rows = torch.arange(24).view(1, 3, 8)
    index = {"source": [0, 1], "destination": [2, 3], "chain": [0, 1, 2], "chain_offsets": [0, 3, 3]}
    given = {name: torch.tensor(value) for name, value in index.items()} | {"end_state": end_state}
    dense = matrices[rows].masked_fill(gone[..., None, None], 0)
    matrices[rows[0][gone]] = torch.nan
    pools = [randn(1, 4, 8, 20, K, seed=3) for _ in range(3)]
    by_row = {"transition": matrices, "transition_rows": rows.masked_fill(gone, -1)}
    interpreted("compose", pools[0], **given, **by_row, tree_groups=groups)
    interpreted("compose", pools[1], **given, transition=dense, tree_groups=groups)
    naive("compose", pool=pools[2], **given, **by_row, tree_groups=groups)
    assert torch.equal(pools[0], pools[1])
    torch.testing.assert_close(pools[0], pools[2], rtol=1e-5, atol=1e-5)
    assert torch.equal(pools[0][0, 2, 4:], end_state[0, 2, 4:])
    assert torch.equal(pools[0][:, 3], pools[0][:, 1])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_pool_without_rows_serves_heads_without_transitions(interpreted: Any, operation: str):
    none = {
        "transition": torch.zeros(0, K, K),
        "transition_rows": torch.full(front(operation), -1),
    }
    got, want = (call(operation, run, none) for run in (interpreted, naive))
    zero = call(operation, naive, {"transition": torch.zeros(*front(operation), K, K)})
    for x, y, z in zip(got, want, zero, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_only_rows_of_entries_that_are_used_are_checked(operation: str):
    """Entry 3 is in no chain and is not jumped over; entry 1 is."""
    pool, _ = both(torch.int8, "side by side", *front(operation))
    if operation != "chunk_h_jump":
        pool["chain"] = torch.tensor([2, 0, 2, 1, 2])
    want, rows = call(operation, naive, pool), pool["transition_rows"]
    unused = rows.index_fill(-2, torch.tensor([3]), 1_000)
    got = call(operation, naive, pool | {"transition_rows": unused})
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    used = rows.index_fill(-2, torch.tensor([1]), 1_000)
    with pytest.raises(ValueError, match=r"transition_rows must name rows .* 0 to 10, or be negative: 1000"):
        call(operation, naive, pool | {"transition_rows": used})


ROWS, MATRIX, SCALE = "transition_rows", "transition", "transition_scale"
BAD = {
    "convert transition_rows to one of int32, int64: torch.float32": lambda a: {ROWS: a[ROWS].float()},
    "transition_rows must have shape": lambda a: {ROWS: a[ROWS][..., :1]},
    "with dense transitions only, in a pool [rows, 16, 16]: ": lambda a: {MATRIX: a[MATRIX].expand(1, 11, K, K)},
    "in a pool [rows, 16, 16]: [11, 16]": lambda a: {MATRIX: a[MATRIX][..., 0]},
    "in a pool [rows, 16, 16]: [11, 16, 8]": lambda a: {MATRIX: a[MATRIX][..., :8]},
    "last 2 dimensions of transition contiguous": lambda a: {MATRIX: a[MATRIX].transpose(1, 2)},
    "transition_scale must have shape [11, 16]: [1, 11, 16]": lambda a: {SCALE: a[SCALE][None]},
    "last 1 dimensions of transition_scale contiguous": lambda a: {SCALE: torch.ones(K, 11).T},
    "transition_scale exactly when": lambda a: {MATRIX: a[MATRIX].float()},
    "0 to 10, or be negative: 11": lambda a: {ROWS: a[ROWS].clamp(max=-1).index_fill(-2, torch.tensor([2]), 11)},
    "move all tensors to one device": lambda a: {ROWS: a[ROWS].to("meta")},
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("operation", ["compose", "chunk_h_jump"])
def test_bad_input_is_refused(operation: str, message: str):
    pool, _ = both(torch.int8, "side by side", *front(operation))
    with pytest.raises(ValueError, match=re.escape(message)):
        call(operation, naive, pool | BAD[message](pool))
