"""Windows that are gathered for a pass: SGLang's Triton convolution is compiled for few numbers of them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from sglang_hybrid.engine.cache.passes.convolution import SIZES, in_sizes

triton_ = importlib.import_module("sglang.kernels.ops.mamba.causal_conv1d_triton")
ahead_of_time = importlib.import_module("benchmarks.kernels.compile")


def convolve(run: Any, count: int) -> None:
    """A prefill of `count` requests of sixteen tokens, on windows that were gathered."""
    tokens, rows = 16 * count, torch.arange(count, dtype=torch.int32)
    run(
        torch.zeros(tokens, 64, dtype=torch.bfloat16).mT, torch.zeros(64, 4, dtype=torch.bfloat16), None,
        conv_states=torch.zeros(count, 64, 3, dtype=torch.bfloat16), cache_indices=rows, activation="silu",
        has_initial_state=torch.ones(count, dtype=torch.bool), seq_lens_cpu=[16] * count,
        query_start_loc=torch.arange(0, tokens + 1, 16, dtype=torch.int32),
    )  # fmt: skip


def test_sglangs_kernel_is_compiled_once_for_up_to_64_requests() -> None:
    def ours(*args: Any, **named: Any) -> Any:
        return in_sizes(triton_.causal_conv1d_fn, *args, **named)

    with ahead_of_time.compiling_for(90) as launches:
        for count in (2, 3, 5, 64):
            convolve(ours, count)
        ours_kernels = {id(kernel) for *_, kernel in launches}
        for count in (2, 3):
            convolve(triton_.causal_conv1d_fn, count)
        all_kernels = {id(kernel) for *_, kernel in launches}
    assert len(ours_kernels) == 1
    assert len(all_kernels) == 3, "SGLang's has one for each number: else this is of no use any more"


@pytest.mark.parametrize("count", [1, 63, 64, 65, 300])
def test_windows_come_back(count: int) -> None:
    windows = torch.randn(count, 5, 3)
    before, given = windows.clone(), []

    def original(x: Any, weight: Any, *, conv_states: torch.Tensor, more: int) -> int:
        given.append(len(conv_states))
        assert torch.equal(conv_states[:count], before)
        conv_states[:count] += 1
        return x + weight + more

    assert in_sizes(original, 1, 2, conv_states=windows, more=3) == 6
    assert given == [next(size for size in SIZES if size >= count)]
    assert torch.equal(windows, before + 1)


@pytest.mark.parametrize("windows", [torch.zeros(9, 2, 5, 3)[:, 0], torch.zeros(SIZES[-1] + 1, 1, 1)])
def test_pools_go_as_they_are(windows: torch.Tensor) -> None:
    """An elastic one has no memory between its pages."""
    assert in_sizes(lambda _, conv_states: conv_states, 0, conv_states=windows) is windows
