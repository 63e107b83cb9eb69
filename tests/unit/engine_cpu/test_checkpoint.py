"""The scatter of live states into checkpoint slots."""

import pytest
import torch

from sglang_hybrid.engine.cpu import checkpoint, slots


@pytest.fixture
def pools(rng):
    """conv [layers, slots, ...] and recurrent [layers, slots, ...]."""
    return torch.randn(2, 8, 3, 4, generator=rng), torch.randn(2, 8, 2, 5, 6, generator=rng)


@pytest.mark.parametrize("all_layers", [True, False])
@pytest.mark.parametrize(("mask", "check_freed", "copied"), [
    ([True, False, True], False, {5: 1, 7: 3}), ([False] * 3, False, {}), ([True] * 3, True, {5: 1, 7: 3}),
])  # fmt: skip
def test_masked_rows_are_copied_and_nothing_else_changes(all_layers, mask, check_freed, copied, pools):
    before = [pool.clone() for pool in pools]
    sources, destinations = torch.tensor([1, -1, 3, 6]), torch.tensor([5, 4, 7, 0])
    arguments = (sources, torch.tensor([*mask, True]), destinations, 3, check_freed)  # the 4th row is beyond the batch
    if all_layers:
        checkpoint.track_states_all_layers(*pools, *arguments)
    else:
        for layer in range(2):
            checkpoint.track_states(pools[0][layer], pools[1][layer], *arguments)
    for pool, old in zip(pools, before, strict=True):
        for slot in range(8):
            assert torch.equal(pool[:, slot], old[:, copied.get(slot, slot)])


@pytest.mark.parametrize("where", [[2, 0], [3, -1, 1], [-1], []])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool_reads_and_writes_skip_padding(where, dtype, rng):
    pool = torch.randn(4, 2, 3, generator=rng).to(dtype)
    before = pool.clone()
    states = slots.read(pool, where)
    assert states.dtype == torch.float32
    for state, slot in zip(states, where, strict=True):
        assert torch.equal(state, before[slot].float() if slot >= 0 else torch.zeros(2, 3))
    slots.write(pool, where, states + 1.0)
    for slot in range(4):
        want = (before[slot].float() + 1.0).to(dtype) if slot in where else before[slot]
        assert torch.equal(pool[slot], want)
