"""A hit and a cold run have equal bits on the chunk grid: when, and for which of our code.

Let a text be cut at a multiple of 64 tokens and continued from the state there, kept in float32. Then every later
state on the grid, the final state, and every state that state_at gives in between have the bits of the uncut run: each
chunk is computed from the same numbers in the same order, whatever else is in the batch. Cut elsewhere, or with states
kept in fewer bits, they agree to rounding only. (That k, v, g and beta have equal bits is up to the layers below.)
tests/kernels/test_chunk_transition.py has the same for chunk_transition.

The claims are about our code: they hold as far as the libraries below add the terms of a sum in an order that depends
on nothing but the sum. The tests make them do so (`fixed_order.py`, and the interpreter's `dot_in_order`).
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid.engine.cpu.gdn import chunk_gated_delta_rule
from sglang_hybrid.engine.cpu.mamba2 import mamba_chunk_scan_combined
from sglang_hybrid_kernels.state_at import state_at
from tests.kernels.recurrences import Tokens, tokens

pytestmark = pytest.mark.usefixtures("fixed_order")

CUTS = [64, 192]
OFF_GRID = 100
LENGTH = 330


def prefill(some: Tokens, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Chunk start states and final states [sequences, HV, V, K] of our CPU platform."""
    slots = initial.clone()
    inputs = [x.unsqueeze(0) for x in (some.k, some.k, some.v, some.g, some.beta)]
    _, _, h = chunk_gated_delta_rule(*inputs, slots, some.cu_seqlens, use_qk_l2norm_in_kernel=False)
    assert h is not None
    return h[0], slots


@pytest.mark.parametrize("sizes", [(4, 2, 16, 8), (2, 1, 64, 64), (4, 4, 128, 128)])
@pytest.mark.parametrize("cut", CUTS)
def test_gdn_prefill_of_the_cpu_platform(sizes: tuple[int, int, int, int], cut: int):
    heads, key_heads, dv, dk = sizes
    some = tokens("gdn", [40, LENGTH, 90], heads, key_heads, dv, dk).to(torch.float32)
    lo, hi = some.bounds[1]
    zero = torch.zeros(1, heads, dv, dk)
    cold, cold_end = prefill(some.cut((lo, hi)), zero)
    _, saved = prefill(some.cut((0, 40), (lo, lo + cut)), zero.repeat(2, 1, 1, 1))
    hit, hit_end = prefill(some.cut((lo + cut, hi), (0, 40)), torch.cat([saved[1:], zero]))
    assert torch.equal(hit[: cold.shape[0] - cut // 64], cold[cut // 64 :])
    assert torch.equal(hit_end[0], cold_end[0])


def test_gdn_prefill_cut_elsewhere_agrees_to_rounding():
    some = tokens("gdn", [LENGTH], 4, 2, 64, 64).to(torch.float32)
    zero = torch.zeros(1, 4, 64, 64)
    _, cold_end = prefill(some, zero)
    _, saved = prefill(some.cut((0, OFF_GRID)), zero)
    _, hit_end = prefill(some.cut((OFF_GRID, LENGTH)), saved)
    torch.testing.assert_close(hit_end, cold_end, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", CUTS)
def test_mamba2_prefill_of_the_cpu_platform(cut: int):
    generator = torch.Generator().manual_seed(0)
    x, dt = torch.randn(1, LENGTH, 4, 64, generator=generator), torch.rand(1, LENGTH, 4, generator=generator)
    b, c = torch.randn(2, 1, LENGTH, 1, 128, generator=generator)
    a = -torch.rand(4, generator=generator)

    def end_of(lo: int, hi: int, initial: Tensor | None) -> Tensor:
        now = slice(lo, hi)
        _, last = mamba_chunk_scan_combined(
            x[:, now], dt[:, now], a, b[:, now], c[:, now], 64, cu_seqlens=torch.tensor([0, hi - lo]),
            initial_states=initial, out=torch.empty_like(x[:, now]), return_varlen_states=True,
        )  # fmt: skip
        assert last is not None
        return last

    assert torch.equal(end_of(cut, LENGTH, end_of(0, cut, None)), end_of(0, LENGTH, None))


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("delta", [True, False])
def test_state_at_between_the_chunk_starts(interpreted: Any, backend: str, delta: bool):
    operation = state_at if backend == "naive" else lambda *a, **k: interpreted("state_at", *a, **k)
    some = tokens("gdn", [LENGTH], 2, 1, 16, 16).to(torch.float32)
    h, _ = prefill(some, torch.zeros(1, 2, 16, 16))

    def states(lo: int, positions: list[int]) -> Tensor:
        rest = some.cut((lo, LENGTH))
        into = torch.full((len(positions), 2, 16, 16), torch.nan)
        at, slots = torch.tensor(positions) - lo, torch.arange(len(positions))
        operation(
            h[lo // 64 :], rest.k, rest.v, rest.g, rest.beta, rest.cu_seqlens, 0 * slots, at, into, slots, delta=delta
        )
        return into

    assert torch.equal(states(0, [129, 200, 329, 330]), states(128, [129, 200, 329, 330]))
