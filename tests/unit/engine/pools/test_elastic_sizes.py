"""How the pools of one rank come to be, with a stand-in for the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.core.config import ENVIRONMENT_KEY, HybridConfig
from sglang_hybrid.device.cuda import CudaDriver
from sglang_hybrid.device.prefault import Prefaulter
from sglang_hybrid.engine.pools import arena, ranks, sizes
from sglang_hybrid.engine.pools.copies import OnHost
from sglang_hybrid.engine.pools.telemetry import figures
from sglang_hybrid.memory.sizing import CUDA, Kinds, choose
from tests.fake_cuda import FakeCuda
from tests.versions import served

pytestmark = served("elastic memory")

KINDS = Kinds(512, 88, 1, 140_000_000)  # of Falcon-H1 7B: columns of 176 and 134 MiB
GPU = 3  # of rank 1, where the first is 2


def configured(algorithm: str, head_layers: int | None = None) -> Any:
    """SGLang's configurator of a model of 44 attention layers, and what of it is asked for."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SimpleNamespace(
        device="cuda", gpu_id=GPU, spec_algorithm=SpeculativeAlgorithm[algorithm],
        spec_aux_config=SimpleNamespace(eagle_draft_num_layers=head_layers),
        layer_info=SimpleNamespace(start_layer=0, end_layer=44),
        mambaish_config=SimpleNamespace(
            full_attention_layer_ids=range(44),
            mamba2_cache_params=SimpleNamespace(mamba_cache_per_req=KINDS.state_bytes),
        ),
    )  # fmt: skip


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A GPU for `size_pools`; `overrides` are what it told SGLang."""
    from sglang.srt import runtime_context

    api = FakeCuda()
    api.overrides = {}
    monkeypatch.setattr(sizes, "CudaDriver", lambda device, **options: CudaDriver(device, api=api, **options))
    monkeypatch.setattr(sizes, "kinds", lambda configurator: KINDS)
    monkeypatch.setattr(sizes, "request_states", lambda original, configurator: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=70 + device.index))
    monkeypatch.setattr(ranks, "of_this_server", lambda: None)
    monkeypatch.setattr(
        runtime_context,
        "get_context",
        lambda: SimpleNamespace(override=lambda name, **given: api.overrides.update(given)),
    )
    monkeypatch.setenv(ENVIRONMENT_KEY, HybridConfig(memory="elastic").to_json())
    return api


@pytest.fixture
def sized(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[arena.Arena]:
    monkeypatch.setattr(arena, "_arena", None)
    monkeypatch.setattr(arena, "begin_on", lambda device: OnHost)
    sizes.size_pools(lambda: 0.0, configured("NONE"), 60.0)
    made = arena.current()
    assert made.prefaulter is not None
    made.prefaulter.wait()
    yield made
    made.prefaulter.stop()
    made.pooled.close()


def test_everything_of_a_rank_is_on_its_gpu(sized: arena.Arena, cuda: FakeCuda) -> None:
    assert sized.device == torch.device("cuda", GPU)
    created = [call[2].location.id for call in cuda.calls if call[0] == "cuMemCreate"]
    assert created
    assert set(created) == {GPU}
    assert {gpu for _, gpu in cuda.worked_on} == {GPU}


def test_zeros_are_written_on_the_stream_that_batches_wait_for(sized: arena.Arena, cuda: FakeCuda) -> None:
    _, first_plane = sized.open(sized.sizing.kv_layout)
    planes = range(first_plane, first_plane + KINDS.kv_planes)
    assert [cuda.byte_at(sized.pooled.address(plane)) for plane in planes] == [0] * KINDS.kv_planes, "page 0"
    assert cuda.zeroed_on == [70 + GPU] * KINDS.kv_planes


def test_sglang_is_told_how_many_states_there_may_be(sized: arena.Arena, cuda: FakeCuda) -> None:
    assert cuda.overrides == {"max_mamba_cache_size": sized.sizing.states}


@pytest.mark.parametrize(
    ("algorithm", "head_layers", "drafts", "counted"),
    [("NONE", None, 0, 0), ("NGRAM", None, 0, 0), ("EAGLE", 1, 1, 1), ("EAGLE", None, 1, 0), ("STANDALONE", 4, 4, 4)],
)
def test_what_speculates_is_in_the_budget(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, algorithm: str, head_layers: int | None, drafts: int, counted: int
) -> None:
    """States of what is verified leave the rest of it; KV of what drafts lies beside that of the model. SGLang counts
    tokens by its own size of one, without a head of which its configuration says nothing."""
    from sglang.srt import runtime_context

    monkeypatch.setattr(arena, "_arena", None)
    monkeypatch.setattr(arena, "begin_on", lambda device: OnHost)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: SimpleNamespace(max_running_requests=48))
    monkeypatch.setattr(runtime_context, "max_speculative_num_draft_tokens", lambda: 4)
    planes = 2 * (44 + drafts)
    monkeypatch.setattr(sizes, "kinds", lambda configurator: Kinds(512, planes, 1, KINDS.state_bytes))
    configurator = configured(algorithm, head_layers)
    assert sizes.draft_layers(configurator) == drafts
    left_gib = sizes.size_pools(lambda: 0.0, configurator, 60.0)
    made = arena.current()
    assert made.prefaulter is not None
    made.prefaulter.stop()
    candidates = 0 if algorithm == "NONE" else 49 * 4 * KINDS.state_bytes
    assert made.sizing.total_bytes == (60 << 30) - candidates
    cell_bytes = 512 * 2 * (44 + counted)
    assert int(left_gib * (1 << 30)) // cell_bytes == made.sizing.tokens
    made.pooled.close()


def test_memory_made_ahead_holds_a_column_of_each_kind(sized: arena.Arena) -> None:
    """Also after one of them was taken: the next may be wanted at once."""
    sizing = sized.sizing
    one_of_each = sizing.kv_column_granules + sizing.state_column_granules
    assert sized.prefaulter is not None
    for layout in (sizing.state_layout, sizing.kv_layout):
        supply, _ = sized.open(layout)
        for _ in range(6):
            sized.prefaulter.wait()
            assert sized.pooled.at_hand >= one_of_each
            assert supply.reserve(len(supply.held) + layout.column_pages)


def test_memory_made_ahead_holds_a_column_larger_than_its_share() -> None:
    sizing = choose(Kinds(1024, 88, 1, 200_000_000), 2 * 10**9, CUDA, 1)
    ahead, least = arena._ahead(sizing)
    assert ahead == least == sizing.kv_column_granules + sizing.state_column_granules > sizing.total // 8


def test_torch_gives_back_what_it_keeps_before_memory_is_said_to_be_short(
    sized: arena.Arena, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 granules that torch keeps, a column of KV takes all; the next one finds nothing to reclaim."""
    kept = [40 * sized.sizing.granule_bytes]
    supply, _ = sized.open(sized.sizing.kv_layout)
    emptied: list[int] = []

    def empty() -> None:
        emptied.append(kept[0])
        cuda.memory += kept[0]
        kept[0] = 0

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: kept[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    column = supply.pool.layout.column_pages
    assert sized.prefaulter is not None
    sized.prefaulter.stop()
    sized.backing.trim(0)
    cuda.memory = sum(cuda.handles.values()) + (sized.sizing.kv_column_granules - 40) * sized.sizing.granule_bytes
    assert supply.reserve(column)
    assert (emptied, sized.pooled.reclaimed) == ([40 * sized.sizing.granule_bytes], 1)
    assert figures(sized, Counter())["reclaims", ""] == 1
    assert not supply.reserve(2 * column)
    assert (len(emptied), sized.pooled.reclaimed) == (2, 1)
    sized.check()
    sized.prefaulter = Prefaulter(sized.pooled, 0)  # for the fixture to stop
    sized.prefaulter.start()
