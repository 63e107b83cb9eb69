"""What segments do to states goes into their entries: every transition that has not vanished, and none that has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_hybrid.engine.segments.batch import Making
from sglang_hybrid.engine.segments.operators import Operators
from sglang_hybrid.engine.segments.settling import Settling
from sglang_hybrid.engine.segments.store import STORED, Layer, Shapes, Store
from sglang_hybrid.segment.index import Costs, Entry, SegmentIndex
from tests.unit.segment.played import MODEL
from tests.unit.segment.test_index import key

CPU = torch.device("cpu")
HEADS, SIZE, LAYERS, LENGTHS = 4, 16, 3, (40, 70)


def store(dense: bool, dtype: str) -> Store:
    shapes = Shapes(LAYERS, (HEADS, SIZE, SIZE), (40, 3), torch.float32, dense, 1, 1, 8, 8, torch.float32)
    return Store(shapes, dtype, 1_000_000, CPU)


def index_of(kept: Store) -> SegmentIndex:
    costs = Costs(MODEL, kept.state_bytes, kept.token_bytes, 1, kept.transitions, kept.transition_bytes)
    return SegmentIndex(kept.blocks, costs)


def entries(index: SegmentIndex) -> list[Entry]:
    found = [index.admit(key(n), n, index.sight(key(n), 0.0), 0.0) for n in LENGTHS]
    return [each for each in found if each is not None]


def making(made: list[Entry]) -> Making:
    """What `Operators` looks at of the segments that a pass makes."""
    nothing: Any = torch.empty(0)
    bounds = torch.tensor([0, LENGTHS[0], sum(LENGTHS)])
    return Making(
        tuple(made), [], torch.tensor([each.block for each in made]),
        torch.stack([torch.from_numpy(each.transitions) for each in made]),
        nothing, nothing, nothing, 0, nothing, bounds, nothing, nothing, nothing,
    )  # fmt: skip


def inputs(dense: bool, seed: int) -> list[torch.Tensor | None]:
    """Keys, values, decays and strengths; the first head forgets at once, the last two hardly anything."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(LENGTHS)
    k, v = (torch.randn(tokens, HEADS, SIZE, generator=generator) for _ in range(2))
    fast = torch.tensor([5.0, 0.5 if seed else 0.001, 0.001, 0.001])
    g = -torch.rand(tokens, HEADS, generator=generator) * fast
    beta = torch.rand(tokens, HEADS, generator=generator) * 0.1 if dense else None
    return [torch.nn.functional.normalize(k, dim=-1), v, g, beta]


def run(kept: Store, made: list[Entry], dense: bool, adds: bool = False) -> torch.Tensor:
    told: list[torch.Tensor] = []
    operators = Operators(making(made), LAYERS, told.append, adds)
    for number, layer in enumerate(kept.layers):
        assert not told, "the last layer was not run yet"
        operators.store(layer, *inputs(dense, number))  # type: ignore[arg-type]
    return told[0]


def transition(layer: Layer, block: int, head: int) -> torch.Tensor:
    """T of a head as it is stored, [K, K] transposed."""
    if layer.transition_rows is None:
        return layer.transition[block, head] * torch.eye(SIZE)
    row = int(layer.transition_rows[block, head])
    if row < 0:
        return torch.zeros(SIZE, SIZE)
    found = layer.transition[row].float()
    return found if layer.transition_scale is None else found * layer.transition_scale[row]


def expected(values: list[torch.Tensor | None], low: int, high: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """T transposed and S_C over tokens [low, high), step by step."""
    k, v, g, beta = (None if x is None else x[low:high, head].double() for x in values)
    assert k is not None
    assert v is not None
    assert g is not None
    product, state = torch.eye(SIZE, dtype=torch.float64), torch.zeros(SIZE, SIZE, dtype=torch.float64)
    for at in range(high - low):
        strength = 0.0 if beta is None else beta[at]
        step = g[at].exp() * (torch.eye(SIZE) - strength * torch.outer(k[at], k[at]))
        written = v[at] if beta is None else beta[at] * v[at]
        product, state = product @ step, state @ step + torch.outer(written, k[at])
    return product, state


@pytest.mark.parametrize("dense", [True, False], ids=["delta", "mamba2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_entries_hold_what_their_segments_do(dense: bool, dtype: str) -> None:
    kept = store(dense, dtype)
    index = index_of(kept)
    kept.buffer.view(torch.uint8).fill_(0xFF)  # NaN as a float
    made = entries(index)
    stay = run(kept, made, dense)
    close = {"float32": 2e-5, "bfloat16": 2e-2, "int8": 3e-2}[dtype]
    bounds = (0, LENGTHS[0], sum(LENGTHS))
    vanished = [0, 0]
    for number, layer in enumerate(kept.layers):
        values = inputs(dense, number)
        for segment, entry in enumerate(made):
            for head in range(HEADS):
                product, state = expected(values, bounds[segment], bounds[segment + 1], head)
                torch.testing.assert_close(
                    transition(layer, entry.block, head).double(), product, atol=close, rtol=close
                )
                end = layer.end_state[entry.block, head].double()
                if layer.end_state_scale is not None:
                    end = end * layer.end_state_scale[entry.block, head]
                torch.testing.assert_close(end, state, atol=close * float(state.abs().max()), rtol=close)
                if layer.transition_rows is not None and layer.transition_rows[entry.block, head] < 0:
                    assert product.abs().max() <= 1e-6
                    vanished[segment] += 1
    if dense:
        assert stay.tolist() == [LAYERS * HEADS - count for count in vanished]
        assert vanished == [3, 5], "two heads forget over the longer one, not over the short one"
    index.check()


def test_what_vanished_leaves_its_slots_to_others() -> None:
    kept = store(True, "float32")
    index = index_of(kept)
    made = entries(index)
    settling = Settling(index, ahead=1, group=None)
    stay = run(kept, made, True)
    before = [(layer.transition_rows[each.block].clone(), each) for layer in kept.layers for each in made]  # type: ignore
    settling.launched(made, stay)
    settling.turn()
    assert [each.transitions.size for each in made] == [12, 12], "the pass may not have run"
    settling.turn()
    assert [each.transitions.size for each in made] == stay.tolist()
    for rows, each in before:
        assert {*rows[rows >= 0].tolist()} <= {*each.transitions.tolist()}, "what is read is kept"
    index.check()


class Ranks:
    """The other rank keeps what `others` say."""

    def __init__(self, others: list[int]) -> None:
        self.others = others

    def most(self, counts: list[int]) -> list[int]:
        return [max(pair) for pair in zip(counts, self.others, strict=True)]


def test_what_stays_on_one_rank_stays_on_all() -> None:
    kept = store(True, "float32")
    index = index_of(kept)
    made = entries(index)
    settling = Settling(index, ahead=0, group=Ranks([3, 7]))  # type: ignore[arg-type]
    settling.launched(made, torch.tensor([5, 6]))
    settling.turn()
    assert [each.transitions.size for each in made] == [5, 7]
    settling.turn()
    index.check()


@pytest.mark.parametrize("dense", [True, False], ids=["delta", "mamba2"])
@pytest.mark.parametrize("dtype", STORED)
def test_states_that_are_added_up_pass_through_segments_as_they_are(dense: bool, dtype: str) -> None:
    kept = store(dense, dtype)
    made = entries(index_of(kept))
    stay = run(kept, made, dense, adds=True)
    for layer in kept.layers:
        for entry in made:
            for head in range(HEADS):
                torch.testing.assert_close(transition(layer, entry.block, head), torch.eye(SIZE))
    assert stay.tolist() == [LAYERS * HEADS * dense] * 2
