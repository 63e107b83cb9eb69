"""The block a server logs at its start."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
