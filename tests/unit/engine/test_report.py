"""The block a server logs at its start."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_hybrid.core.spec import from_config
from sglang_hybrid.engine import report
from tests.engine.configs import QWEN3_NEXT


@pytest.mark.parametrize(
    ("each_bytes", "extra_bytes", "told"),
    [
        (58_368, 0, False),
        (58_368, 512_000, False),  # elastic memory: the last column is not full
        (53_760, 0, True),
        (60_000, 0, True),
    ],
)
def test_states_are_noted_only_if_they_differ_from_the_cost_model(
    each_bytes: int, extra_bytes: int, told: bool
) -> None:
    spec = replace(from_config(QWEN3_NEXT), checkpoint_bytes=58_368)
    pools = report.Pools(tokens=1, kv_bytes=1, states=17_123, state_bytes=17_124 * each_bytes + extra_bytes)
    assert bool(report.surprise(pools, spec)) is told
    assert report.surprise(pools, None) == []


@pytest.mark.parametrize(
    ("kept", "times"),
    [(torch.bfloat16, 1.0), (torch.float32, 2.0), (torch.float8_e4m3fn, 0.5), (torch.float8_e5m2, 0.5)],
    ids=str,
)
def test_kv_costs_what_it_takes_in_this_server(
    kept: torch.dtype, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the configuration's weights would take: 8 bits are asked for by a flag or by the checkpoint itself."""
    for name in ("SGLANG_MAMBA_SSM_DTYPE", "SGLANG_MAMBA_CONV_DTYPE"):
        monkeypatch.delenv(name, raising=False)
    configuration = SimpleNamespace(to_dict=lambda: QWEN3_NEXT)
    ctx = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=configuration, context_len=4096),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(kv_cache_dtype=kept)),
    )
    spec = report.model_spec(ctx)
    assert spec is not None
    plain = from_config(QWEN3_NEXT, kv_dtype="bfloat16")
    assert spec.kv_bytes_per_token == times * plain.kv_bytes_per_token
    assert spec.checkpoint_bytes == plain.checkpoint_bytes


def test_what_lies_beside_kv_and_states_is_measured_too() -> None:
    """An index of 132 bytes for each token, and of a state a window and the last tokens."""
    size, page = 128, 64
    latents = SimpleNamespace(
        kv_buffer=[torch.zeros(size + page, 1, 256, dtype=torch.bfloat16)],
        index_k_with_scale_buffer=[torch.zeros(3, page * 132, dtype=torch.uint8), torch.zeros(0, page * 132)],
    )
    kv = SimpleNamespace(full_kv_pool=latents, page_size=page)
    allocator = SimpleNamespace(size=size, get_kvcache=lambda: kv)
    temporal = torch.zeros(2, 5, 4, 8, 8)
    cache = SimpleNamespace(conv=[], temporal=temporal, mem_usage_bytes=lambda: temporal.nbytes)
    beside = [
        SimpleNamespace(conv_state=torch.zeros(1, 5, 16, 9, dtype=torch.bfloat16)),
        SimpleNamespace(context=torch.zeros(5, 2, dtype=torch.int64)),
    ]
    states = SimpleNamespace(mamba_cache=cache, size=4, _slot_siblings=beside)
    pools = report.read_pools(SimpleNamespace(mamba_pool=states), allocator)
    assert pools.bytes_per_token == 512 + 132
    assert pools.bytes_per_state == 2 * 4 * 8 * 8 * 4 + 16 * 9 * 2 + 2 * 8
