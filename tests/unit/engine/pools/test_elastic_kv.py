"""SGLang's hybrid pool over an arena, with keys and values and with latents: what it builds, writes and copies."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.pools import arena as arenas
from sglang_hybrid.engine.pools import sizes
from sglang_hybrid.engine.pools.arena import Arena
from sglang_hybrid.memory.sizing import HOST, KV, STATE, Kinds, Sizing, choose
from tests.clock import LogicalClock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns about absent accelerators
    from sglang_hybrid.engine.pools import kv

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:sglang"),
    pytest.mark.skipif(not compat.complete(), reason="elastic memory is refused with this SGLang"),
]

LAYERS, PAGE, RANK, ROPE = (3, 7), 16, 40, 8
LATENT = Kinds((RANK + ROPE) * 4, len(LAYERS), PAGE, 20_000)
LATENTS = [
    pytest.param(LATENT, id="whole pages in a granule"),
    pytest.param(Sizing(LATENT, 32768, 1 << 20, 2), id="whole pages in three granules"),
]
PLAIN = Kinds(2 * 8 * 4, 2 * len(LAYERS), PAGE, 20_000)


@pytest.fixture
def arena(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """Memory for the kinds or of the sizing that a test names, of 1 MiB."""
    asked = request.param
    sizing = asked if isinstance(asked, Sizing) else choose(asked, 1 << 20, HOST, 2)
    with closing(HostDriver(sizing.total * sizing.granule_bytes, sizing.granule_bytes)) as driver:
        made = Arena(sizing, driver, torch.device("cpu"), 1.0, LogicalClock().now)
        made.open(sizing.state_layout)
        monkeypatch.setattr(arenas, "_arena", made)
        yield made
        made.pooled.close()


def hybrid(monkeypatch: pytest.MonkeyPatch, arena: Arena, latent: bool, **changed: Any) -> Any:
    """The pool of a model, built by SGLang of our classes."""
    from sglang.srt.mem_cache import memory_pool

    given: dict[str, Any] = {"full_kv_pool_class": kv.ElasticLatents if latent else kv.ElasticKV}
    if latent:
        monkeypatch.setattr(memory_pool, "MLATokenToKVPool", kv.ElasticLatents)  # where 0.5.21 finds it
        alone = SimpleNamespace(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0)
        monkeypatch.setattr(memory_pool, "get_parallel", lambda: alone)
        given |= {"use_mla": True, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}
    return memory_pool.HybridLinearKVPool(
        size=arena.sizing.tokens, page_size=PAGE, head_num=2, head_dim=8, device="cpu", mamba_pool=None,
        **({"dtype": torch.float32, "full_attention_layer_ids": list(LAYERS)} | given | changed),
    )  # fmt: skip


@pytest.mark.parametrize("arena", LATENTS, indirect=True)
def test_latents_have_one_plane_per_layer(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = hybrid(monkeypatch, arena, latent=True)
    layout = arena.sizing.kv_layout
    assert layout.run == (3 if arena.sizing.granule_bytes == 32768 else 1)
    slots = layout.columns * layout.column_slots
    assert type(pool.full_kv_pool) is kv.ElasticLatents
    assert set(arena.supplies) == {KV, STATE}
    for layer in LAYERS:
        keys, values = pool.get_kv_buffer(layer)
        assert (keys.shape, values.shape) == ((slots, 1, RANK + ROPE), (slots, 1, RANK))
        assert keys.is_contiguous(), "kernels view it by pages"
        assert values.data_ptr() == keys.data_ptr()
        assert not keys[:PAGE].any(), "the padding page has memory"
    assert pool.full_kv_pool.host_capacity_tokens == arena.sizing.host_tokens
    assert pool.full_kv_pool.host_capacity_bytes == arena.sizing.host_tokens * 2 * 4 * (RANK + ROPE)
    assert pool.get_kv_size_bytes() == slots * LATENT.token_bytes
    arena.check()


@pytest.mark.parametrize("arena", LATENTS, indirect=True)
def test_latents_are_written_moved_and_brought_back(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a batch, by a sorted cache and by a request that is retracted; other layers keep theirs."""
    pool = hybrid(monkeypatch, arena, latent=True)
    supply = arena.supplies[KV]
    pages = supply.take(supply.pool.layout.column_pages + 2)  # of two columns
    assert pages is not None
    slots = (pages[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)
    here, there = slots[: 2 * PAGE], slots[-2 * PAGE :]
    rows = torch.randn(len(here), 1, RANK + ROPE)
    pool.set_kv_buffer(SimpleNamespace(layer_id=LAYERS[1]), here, rows, rows[..., :RANK])
    first, second = (pool.get_key_buffer(layer) for layer in LAYERS)
    assert torch.equal(second[here], rows)
    assert not first[here].any()
    pool.move_kv_cache(there, here)
    assert torch.equal(second[there], rows)
    copy = pool.get_cpu_copy(there)
    second[there] = 0
    pool.load_cpu_copy(copy, here.flip(0))
    assert torch.equal(second[here.flip(0)], rows)
    supply.give(pages)
    arena.release()
    arena.check()
    assert arena.pooled.mapped_bytes == arena.sizing.granule_bytes * (
        arena.sizing.kv_column_granules + arena.sizing.state_column_granules
    )


@pytest.mark.parametrize("arena", [PLAIN], indirect=True)
def test_keys_and_values_have_a_plane_each(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = hybrid(monkeypatch, arena, latent=False)
    buffers = [each.data_ptr() for layer in LAYERS for each in pool.get_kv_buffer(layer)]
    assert len(set(buffers)) == PLAIN.kv_planes
    assert pool.get_key_buffer(LAYERS[0]).shape[1:] == (2, 8)


@pytest.mark.parametrize("arena", [replace(PLAIN, kv_planes=6), replace(LATENT, kv_planes=3)], indirect=True)
def test_what_drafts_has_its_own_rows_in_the_same_pages(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    latent = arena.sizing.kinds.kv_planes == 3
    target = hybrid(monkeypatch, arena, latent)
    draft = hybrid(monkeypatch, arena, latent, full_attention_layer_ids=[0])
    buffers = {pool.get_kv_buffer(layer)[0].data_ptr() for pool in (target, draft) for layer in pool_layers(pool)}
    assert len(buffers) == len(LAYERS) + 1
    assert arena.kv_planes_left == 0
    assert target.full_kv_pool.supply is draft.full_kv_pool.supply
    pages = target.full_kv_pool.supply.take(2)
    slots = (pages[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)
    heads, size = draft.get_key_buffer(0).shape[1:]
    rows = torch.randn(len(slots), heads, size)
    draft.set_kv_buffer(SimpleNamespace(layer_id=0), slots, rows, rows[..., :RANK] if latent else rows)
    assert torch.equal(draft.get_key_buffer(0)[slots], rows)
    assert not any(target.get_key_buffer(layer)[slots].any() for layer in LAYERS)
    tokens = arena.sizing.host_tokens
    host = [target.full_kv_pool.host_capacity_tokens, draft.full_kv_pool.host_capacity_tokens]
    assert host == [tokens, None], "SGLang makes the tier of a draft as long as that of the target"
    row_bytes = arena.sizing.kinds.kv_row_bytes * (1 if latent else 2)
    assert draft.full_kv_pool.host_capacity_bytes == tokens * row_bytes
    with pytest.raises(ConfigError, match="size was known before"):
        hybrid(monkeypatch, arena, latent, full_attention_layer_ids=[0])
    arena.check()


def pool_layers(pool: Any) -> list[int]:
    return list(pool.full_attention_layer_id_mapping)


@pytest.mark.parametrize(
    ("arena", "latent", "changed"),
    [
        pytest.param(PLAIN, True, {}, id="another width than was told"),
        pytest.param(LATENT, True, {"dtype": torch.bfloat16}, id="another type than was told"),
        pytest.param(LATENT, False, {}, id="keys and values where latents were told"),
    ],
    indirect=["arena"],
)
def test_a_pool_of_another_size_is_refused(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, latent: bool, changed: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"size was known before; add --hybrid-memory static: .*\(\d+, \d, 16\)$"):
        hybrid(monkeypatch, arena, latent, **changed)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(("latent", "row_bytes", "planes"), [(True, 2 * (RANK + ROPE), 1), (False, 2 * 64, 2)])
def test_what_a_token_takes(
    monkeypatch: pytest.MonkeyPatch, latent: bool, row_bytes: int, planes: int, drafts: bool
) -> None:
    """Two of three attention layers lie on this rank; a latent is not divided among ranks."""
    from sglang.srt import runtime_context

    parallel = SimpleNamespace(attn_tp_size=2, attn_dcp_size=1)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: SimpleNamespace(page_size=PAGE))
    model = SimpleNamespace(
        head_dim=16, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, get_num_kv_heads=lambda tp, dcp: 8 // tp
    )
    states = SimpleNamespace(mamba_cache_per_req=20_000)
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    configurator = SimpleNamespace(
        spec_algorithm=SpeculativeAlgorithm["EAGLE" if drafts else "NONE"],
        spec_aux_config=SimpleNamespace(eagle_draft_num_layers=1),
        use_mla_backend=latent, model_config=model, kv_cache_dtype=torch.bfloat16,
        layer_info=SimpleNamespace(start_layer=2, end_layer=8),
        mambaish_config=SimpleNamespace(full_attention_layer_ids=[1, *LAYERS], mamba2_cache_params=states),
    )  # fmt: skip
    assert sizes.kinds(configurator) == Kinds(row_bytes, planes * (3 if drafts else 2), PAGE, 20_000)
