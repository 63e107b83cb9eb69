"""Convolution windows as states: cut out of a prefill's inputs at any token, and written only where a layer ran."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_hybrid.engine.cache.passes import forward, windows
from sglang_hybrid.engine.cache.requests import Checkpoint, tracked
from tests.unit.engine.cache.passes.test_prefill_rows import Extending

WIDTH, CHANNELS = 2, 5


def a_pass(positions: list[list[int]], prefixes: list[int], lengths: list[int]) -> list[Checkpoint]:
    """Begin a pass; request i saves states at `positions[i]` to slots 10, 11, ..."""
    slot, requests = 10, []
    for wanted in positions:
        req = SimpleNamespace()
        for at in wanted:
            tracked(req).planned.append(Checkpoint(at, at, torch.tensor([slot])))
            slot += 1
        requests.append(req)
    batch = SimpleNamespace(forward_mode=Extending(), reqs=requests, prefix_lens=prefixes, extend_lens=lengths)
    forward.carry(None, None, batch, SimpleNamespace(is_draft_worker=False))
    backend = SimpleNamespace(
        forward_metadata=SimpleNamespace(query_start_loc=torch.zeros(3, dtype=torch.int32)),
        conv_states_shape=(1, 9, CHANNELS, WIDTH), _translate_mamba_indices=lambda slots: slots,
    )  # fmt: skip
    passed = SimpleNamespace(forward_mode=Extending(), extend_prefix_lens_cpu=prefixes, extend_seq_lens_cpu=lengths)
    windows.plan(None, backend, passed)
    return [checkpoint for req in requests for checkpoint in tracked(req).planned]


def layer(x: torch.Tensor, pool: torch.Tensor) -> None:
    def convolve(given: Any, weight: Any, conv_states: Any) -> str:
        assert given is x
        return "convolved"

    assert windows.save(convolve, x, None, conv_states=pool) == "convolved"


def test_windows_end_at_their_positions_in_every_layer() -> None:
    found = a_pass([[2, 7], [], [103]], [0, 50, 100], [7, 4, 6])
    assert not any(checkpoint.written for checkpoint in found), "no layer ran yet"
    for layer_seed in range(2):
        x = torch.randn(CHANNELS, 17, generator=torch.Generator().manual_seed(layer_seed))
        pool = torch.zeros(13, CHANNELS, WIDTH, dtype=torch.bfloat16)
        layer(x, pool)
        # The third request's tokens begin at column 11; position 103 is its third.
        for slot, end in ((10, 2), (11, 7), (12, 14)):
            assert torch.equal(pool[slot], x[:, end - WIDTH : end].bfloat16())
        assert not pool[:10].any()
    assert all(checkpoint.written for checkpoint in found)


def test_the_fused_kernel_of_h100s_leaves_the_same_windows() -> None:
    """LFM2-8B-A1B's prefills run it there, and no other convolution."""
    found = a_pass([[2, 7], [], [103]], [0, 50, 100], [7, 4, 6])
    b, c, x = torch.randn(3, 17, CHANNELS, generator=torch.Generator().manual_seed(7)).bfloat16()
    fused, plain = torch.zeros(2, 13, CHANNELS, WIDTH, dtype=torch.bfloat16)

    def kernel(*given: Any) -> str:
        assert all(one is other for one, other in zip(given, (b, c, x, None, fused, 1, 2, 3, 4), strict=True))
        return "computed"

    assert windows.save_fused(kernel, b, c, x, None, fused, 1, 2, 3, 4) == "computed"
    assert all(checkpoint.written for checkpoint in found)
    layer((b * x).transpose(0, 1), plain)
    assert fused[10:].any()
    assert torch.equal(fused, plain)


def test_a_window_that_begins_before_the_pass_is_not_written() -> None:
    (early, behind) = a_pass([[101, 107]], [100], [6])
    pool = torch.zeros(13, CHANNELS, WIDTH)
    layer(torch.randn(CHANNELS, 6), pool)
    assert not early.written
    assert not behind.written
    assert not pool.any()


def test_the_next_pass_has_rows_of_its_own() -> None:
    a_pass([[4]], [0], [6])
    a_pass([[]], [0], [6])
    pool = torch.zeros(13, CHANNELS, WIDTH)
    layer(torch.randn(CHANNELS, 6), pool)
    assert not pool.any()
