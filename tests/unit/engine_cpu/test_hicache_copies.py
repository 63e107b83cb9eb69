"""Copies between a device's pools, [slots, ...] per layer, and pages in host memory."""

from __future__ import annotations

import pytest
import torch

from sglang_hybrid.engine.hicache import copies


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("tensors", [1, 2])
def test_what_was_backed_up_comes_back(page, tensors, rng):
    layers, slots, shape = 3, 8 * page, (2, 5)
    device = [torch.randn(slots, *shape, generator=rng) for _ in range(tensors * layers)]
    host = [torch.zeros(6, layers, page, *shape) for _ in range(tensors)]
    before = [pool.clone() for pool in device]
    pages = torch.tensor([4, 1, 5])
    there = (pages[:, None] * page + torch.arange(page)).reshape(-1)
    here = (torch.tensor([7, 0, 3])[:, None] * page + torch.arange(page)).reshape(-1)
    copies.back_up_layers(device, host, here, there, page_size=page)
    for tensor in host:
        assert int(tensor.flatten(1).any(1).sum()) == 3, "no other page was written"
    elsewhere = here.flip(0) if page == 1 else (here + page) % slots
    for layer in range(layers):
        targets = [device[tensor * layers + layer] for tensor in range(tensors)]
        copies.load_layer(host, targets, there, elsewhere, layer, page_size=page)
        for tensor, target in enumerate(targets):
            old = before[tensor * layers + layer]
            assert torch.equal(target[elsewhere], old[here])
            others = torch.ones(slots, dtype=torch.bool)
            others[elsewhere] = False
            assert torch.equal(target[others], old[others])


def test_a_state_is_one_page_of_its_own_shape(rng):
    state = torch.randn(2, 5, 3, 4, 4, generator=rng)  # layers, slots, ...
    host = torch.zeros(6, 2, 1, 3, 4, 4)
    copies.back_up_layers([*state], [host], torch.tensor([3]), torch.tensor([2]), page_size=1)
    assert torch.equal(host[2, :, 0], state[:, 3])
