"""Every granule that is chosen for a published model on a GPU, through the stand-in for the driver."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import PRESETS, ModelSpec
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.device.cuda import CudaDriver
from sglang_hybrid.memory.budget import Budget
from sglang_hybrid.memory.sizing import CUDA, HOST, Kinds, choose

MODELS = sorted(
    name
    for name, spec in PRESETS.items()
    if spec.temporal_bytes and spec.conv_bytes and spec.layer_counts.get("attention")  # what elastic memory takes
)
BUDGETS_GB = (20, 40, 70, 110, 140)
RANKS = (1, 2, 4, 8)
PAGES = (1, 64)
REQUEST_STATES = 5


def ranks_of(name: str) -> Iterator[ModelSpec]:
    """The model on one of so many ranks, where its heads divide."""
    for ranks in RANKS:
        try:
            yield PRESETS[name].per_rank(ranks)
        except ConfigError:
            continue


def kinds_of(spec: ModelSpec, page_tokens: int) -> Kinds:
    return Kinds(spec.kv_row_bytes, spec.kv_planes, page_tokens, spec.checkpoint_bytes)


def test_models_of_every_family_are_asked() -> None:
    assert len(MODELS) >= 8
    assert all(next(ranks_of(name)).tp == 1 for name in MODELS)


@pytest.mark.parametrize("gigabytes", BUDGETS_GB)
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_reserves_and_maps_what_was_chosen(make_cuda: Any, name: str, gigabytes: int) -> None:
    for spec in ranks_of(name):
        for page in PAGES:
            sizing = choose(kinds_of(spec, page), gigabytes * 10**9, CUDA, REQUEST_STATES)
            driver = CudaDriver(0, api=make_cuda())
            with PooledBacking(driver, [], sizing.granule_bytes, sizing.total) as backing:
                budget = Budget(sizing.total_bytes, sizing.granule_bytes, backing)
                for layout in (sizing.state_layout, sizing.kv_layout):
                    budget.add_pool(layout, backing.add_planes(layout.plane_granules))
                backing.check()
                assert backing.mapped_bytes == sizing.granule_bytes * (
                    sizing.kv_column_granules + sizing.state_column_granules
                )


@pytest.mark.parametrize(
    ("name", "ranks", "gigabytes", "granule_mib", "kv_mib", "state_mib"),
    [
        ("qwen3-next-80b-a3b", 1, 70, 2, 48, 74),
        ("qwen3-next-80b-a3b", 1, 110, 2, 48, 74),
        ("qwen3-next-80b-a3b", 4, 140, 4, 96, 20),
        ("qwen3.5-35b-a3b", 1, 40, 2, 40, 62),
        ("nemotron-h-8b", 1, 110, 2, 16, 98),
        ("falcon-h1-7b", 1, 140, 4, 352, 136),
        ("kimi-linear-48b-a3b", 1, 70, 2, 126, 42),  # latents of 1,152 bytes: 18 MiB of each plane hold whole ones
        ("kimi-linear-48b-a3b", 8, 70, 18, 126, 18),  # three states, which another granule would not serve better
        ("zamba2-7b", 8, 40, 2, 364, 20),
        ("zamba2-7b", 1, 40, 14, 364, 154),  # rows of 14,336 bytes: 14 MiB is the least that holds whole ones
    ],
)
def test_what_is_chosen(name: str, ranks: int, gigabytes: int, granule_mib: int, kv_mib: int, state_mib: int) -> None:
    """The table of docs/decisions.md."""
    sizing = choose(kinds_of(PRESETS[name].per_rank(ranks), 1), gigabytes * 10**9, CUDA, REQUEST_STATES)
    column = [sizing.kv_column_granules, sizing.state_column_granules]
    assert [sizing.granule_bytes >> 20, *(each * sizing.granule_bytes >> 20 for each in column)] == [
        granule_mib,
        kv_mib,
        state_mib,
    ]


@pytest.mark.parametrize("gigabytes", BUDGETS_GB)
@pytest.mark.parametrize("name", MODELS)
def test_columns_are_small_and_handles_few(name: str, gigabytes: int) -> None:
    for spec in ranks_of(name):
        for page in PAGES:
            kinds = kinds_of(spec, page)
            sizing = choose(kinds, gigabytes * 10**9, CUDA, REQUEST_STATES)
            whole_pages = math.lcm(2 << 20, kinds.kv_row_bytes * page)
            few = -(-gigabytes * 10**9 // 65536)
            least = -(-few // whole_pages) * whole_pages
            assert sizing.total <= 65536
            assert sizing.granule_bytes <= max(8 << 20, least)
            assert sizing.granule_bytes * sizing.kv_column_granules <= max(200 << 20, least * kinds.kv_planes)


def test_on_a_host_a_granule_may_be_as_large_as_the_address_space_wants() -> None:
    kinds = kinds_of(PRESETS["qwen3-next-80b-a3b"], 1)
    assert 110 * 10**9 // choose(kinds, 110 * 10**9, HOST, REQUEST_STATES).granule_bytes <= 16384
