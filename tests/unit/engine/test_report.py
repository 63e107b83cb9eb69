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
