"""Rows over jumped segments: outputs and states are those of one run over all tokens, for every family of layers."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine.segments import stages
from sglang_hybrid.engine.segments.batch import Composed, PassBatch
from sglang_hybrid.engine.segments.draft import build
from sglang_hybrid.engine.segments.linear import LinearPass, Pools
from sglang_hybrid.engine.segments.operators import Operators
from sglang_hybrid.engine.segments.store import Shapes, Store
from sglang_hybrid.segment.blocks import Blocks
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.segment.index import Costs, SegmentIndex
from sglang_hybrid.segment.keys import Identity
from sglang_hybrid.segment.passes import Pass
from sglang_hybrid.segment.prompt import Limits, SegmentedPrompt
from sglang_hybrid.segment.slabs import Cut

SMALL = ModelSpec("toy", kv_bytes_per_token=512, checkpoint_bytes=58_368, flops_per_token=1e6, flops_per_token_pair=10)
CPU, WINDOW = torch.device("cpu"), 3
HEADS, KEY_HEADS, SIZE = 4, 2, 8


def store(dense: bool, dtype: str = "float32") -> Store:
    shapes = Shapes(1, (HEADS, SIZE, SIZE), (40, WINDOW), torch.float32, dense, 1, 2, 16, 16, torch.float32)
    return Store(shapes, dtype, 400_000, CPU)


def index_of(kept: Store) -> SegmentIndex:
    costs = Costs(SMALL, kept.state_bytes, kept.token_bytes, 1, kept.transitions, kept.transition_bytes)
    return SegmentIndex(kept.blocks, costs)


def linear(batch: PassBatch, slots: torch.Tensor | None) -> LinearPass:
    made = None if batch.making is None else Operators(batch.making, 1, lambda stay: None)
    return LinearPass(batch, slots, CPU, made)


def prompt(ranges: list[tuple[int, int]], tokens: int, seed: int = 0) -> SegmentedPrompt:
    rng = random.Random(seed)
    ids = array("q", [rng.randrange(1000) for _ in range(tokens)])
    return SegmentedPrompt(ids, tuple(ranges), Seams(8, WINDOW), Identity("test", 8, 8))


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [tokens, heads, V] and all states [tokens + 1, heads, V, K] in float64, token by token."""
    q, k, v, g = (x.double() for x in (q, k, v, g))
    q, k = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (q, k))
    state = torch.zeros(HEADS, SIZE, SIZE, dtype=torch.float64)
    outputs, states = [], [state]
    for t in range(len(q)):
        state = state * g[t].exp().view(HEADS, 1, -1)
        value = v[t]
        if beta is not None:
            value = beta[t].double()[:, None] * (value - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + value[:, :, None] * k[t][:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def inputs(tokens: int, family: str) -> list[torch.Tensor | None]:
    """Queries, keys, values, log decay and strength; the decay of "kda" is by channel, that of "kda-fast" strong."""
    generator = torch.Generator().manual_seed(3)
    by_channel = family.startswith("kda")
    q, k = (torch.randn(tokens, HEADS if by_channel else KEY_HEADS, SIZE, generator=generator) for _ in range(2))
    v = torch.randn(tokens, HEADS, SIZE, generator=generator)
    g = -torch.rand(tokens, HEADS, *[SIZE] * by_channel, generator=generator) * 0.02
    if family == "kda-fast":  # channels from hardly any decay to e^-60 a token: no exponent may be split in two
        g = g * torch.logspace(0, 3.5, SIZE)
    beta = None if family == "mamba2" else torch.rand(tokens, HEADS, generator=generator)
    unit = torch.nn.functional.normalize
    return [unit(q, dim=-1), unit(k, dim=-1), v, g, beta]


def passes(made: SegmentedPrompt, index: SegmentIndex, total: int, limits: Limits) -> list[Pass]:
    found, start = [], 0
    while start < total:
        one = made.begin(start, total, limits, index, 0.0)
        assert one is not None
        found.append(made.commit(index))
        start = one.end
    return found


@pytest.fixture(params=["all heads at once", "one head after the other"])
def turns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many heads of a layer there is memory for."""
    if request.param != "all heads at once":
        monkeypatch.setattr(stages, "_TURN_ELEMENTS", 1)


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("family", ["delta", "mamba2", "kda", "kda-fast"])
@pytest.mark.parametrize("budget", [10_000, 230])
def test_a_jump_over_what_was_run_is_as_good_as_running_it(family: str, budget: int) -> None:
    """Interiors have the same keys and values here as if they were run in place, so nothing is approximated."""
    kept = store(family != "mamba2")
    index = index_of(kept)
    total, ranges = 500, [(30, 130), (130, 230), (300, 420)]
    values = inputs(total, family)
    outputs, states = recurrence(*values)  # type: ignore[arg-type]
    pools = Pools(torch.zeros(3, 40, WINDOW), torch.zeros(3, HEADS, SIZE, SIZE))
    made = prompt(ranges, total)
    for one in passes(made, index, total, Limits(budget, budget)):
        composed = Composed(0, one, made.ids, torch.tensor(1), 0)
        batch = build([one.start], [one.end - one.start], [composed], total, WINDOW, CPU)
        at = places(batch, one)
        run = linear(batch, None)
        y = run._run(kept.layers[0], pools, *(None if x is None else x[at] for x in values))  # type: ignore[arg-type]
        own = len(batch.attended.tokens)
        torch.testing.assert_close(y[:own].double(), outputs[at[:own]], atol=2e-5, rtol=1e-4)
        if one.pending is None:
            torch.testing.assert_close(pools.temporal[1].double(), states[one.end], atol=2e-5, rtol=1e-4)
    index.check()


def places(batch: PassBatch, one: Pass) -> list[int]:
    """The position in the prompt of every linear token: own ones as they stand, cold ones where they came from."""
    own = batch.attended.positions.tolist()
    return own + [at for cold in one.cold for at in range(cold.start, cold.end)]


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("family", ["delta", "kda"])
def test_states_inside_rows_are_saved(family: str) -> None:
    from sglang_hybrid.engine.cache.requests import Checkpoint

    kept = store(True)
    index = index_of(kept)
    total = 400
    values = inputs(total, family)
    _, states = recurrence(*values)  # type: ignore[arg-type]
    made = prompt([(100, 250)], total)
    one = made.begin(0, total, Limits(10_000, 10_000), index, 0.0)
    assert one is not None
    made.commit(index)
    wanted = [64, 300, 400]
    checkpoints = tuple(Checkpoint(at, at, torch.tensor([2 + n])) for n, at in enumerate(wanted))
    batch = build([0], [total], [Composed(0, one, made.ids, torch.tensor(1), 0, checkpoints)], total, WINDOW, CPU)
    assert batch.saves is not None
    slots = torch.cat([checkpoint.slot for checkpoint in batch.saves.checkpoints])
    pools = Pools(torch.zeros(6, 40, WINDOW), torch.zeros(6, HEADS, SIZE, SIZE))
    at = places(batch, one)
    linear(batch, slots)._run(kept.layers[0], pools, *(x[at] for x in values))  # type: ignore[index, arg-type]
    for checkpoint in batch.saves.checkpoints:
        found = pools.temporal[int(checkpoint.slot)].double()
        torch.testing.assert_close(found, states[checkpoint.position], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("key_heads", "heads"), [(1, 128), (2, 32), (8, 256), (16, 32), (32, 32), (3, 9)])
def test_turns_have_every_head_once_with_its_keys(key_heads: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = stages.Chunks((0, 640), 64, CPU)
    for elements in (1, 1 << 19, 1 << 21, 1 << 24, 1 << 28):
        monkeypatch.setattr(stages, "_TURN_ELEMENTS", elements)
        found = []
        for some, keys in stages.turns(chunks, key_heads, heads, 64, 64):
            each = (some.stop - some.start) // (keys.stop - keys.start)
            pairs = [(head, keys.start + (head - some.start) // each) for head in range(some.start, some.stop)]
            found += pairs
        assert found == [(head, head // (heads // key_heads)) for head in range(heads)]
    assert len(pairs) == heads, "one turn is enough"


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_runs_every_token_once_and_copies_the_others(seed: int) -> None:
    rng = random.Random(seed)
    index = SegmentIndex(Blocks(400, Cut(100)), Costs(SMALL, 1000, 10))
    composed, prefixes, lengths, seen = [], [], [], []
    for row in range(rng.randint(1, 4)):
        total, ranges, at = 0, [], rng.randint(0, 40)
        for _ in range(rng.randint(0, 4)):
            length = rng.randint(64, 150)
            ranges.append((at, at + length))
            at += length + rng.choice([0, 0, 5, 90])
        total = at + rng.randint(1, 50)
        made = prompt(ranges, total, seed=rng.randrange(3))
        one = made.begin(0, total, Limits(10_000, 10_000), index, 0.0)
        assert one is not None
        made.commit(index)
        prefixes.append(0)
        lengths.append(total)
        seen.append((row, one, made))
        if one.composed:
            composed.append(Composed(row, one, made.ids, torch.tensor(row + 1), row))
    if not composed:
        return
    batch = build(prefixes, lengths, composed, 4096, WINDOW, CPU)
    ids = torch.tensor([token for _, _, made in seen for token in made.ids])
    stream = torch.cat([ids, batch.extra])[batch.take]
    assert sum(batch.lengths) == len(stream) == len(batch.positions)
    begins, at = [sum(lengths[:row]) for row in range(len(lengths))], 0
    covered = torch.zeros(sum(lengths), dtype=torch.int64)
    for row, one, made in seen:
        run = stream[at : at + batch.lengths[row]]
        positions = batch.positions[at : at + batch.lengths[row]]
        assert len(run) == (one.run_tokens if one.composed else lengths[row])
        assert positions[-1] == one.end - 1
        for cold in one.cold:
            assert run[: cold.tokens].tolist() == list(made.ids[cold.start : cold.end])
            assert positions[: cold.tokens].tolist() == list(range(cold.tokens))
            run, positions = run[cold.tokens :], positions[cold.tokens :]
        assert run.tolist() == [made.ids[p] for p in positions.tolist()]
        covered[begins[row] + positions] += 1
        at += batch.lengths[row]
    for moves in (batch.early, batch.late):
        if moves is not None:
            covered[moves.target] += 1
            assert len(moves.source) == len(moves.target) == int(moves.bounds[-1])
    assert covered.eq(1).all()
