"""What the scheduler is told of the longest prompt and answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_hybrid.engine.cache import hooks

CONTEXT = 400
RESERVE = "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode"


@pytest.mark.parametrize(("drafts", "most"), [(1, CONTEXT - 1), (4, CONTEXT - 8), (16, CONTEXT - 32)])
def test_drafts_of_the_last_step_lie_in_the_context(monkeypatch: pytest.MonkeyPatch, drafts: int, most: int) -> None:
    """What a step sets aside, and what attention reads of it, is within the context, or all KV if that is less.

    The scheduler prepares a step before it knows the one that runs: of `most - 2` tokens that are not the last ones it
    knows, one run is verified and another one is set aside.
    """
    monkeypatch.setattr(RESERVE, lambda: 2 * drafts)
    pool = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(page_size=1))
    worker = SimpleNamespace(model_runner=pool)
    info = hooks.admissible((3000, 512, 8, None, CONTEXT - 1, CONTEXT - 6, "rest"), worker)
    assert info == (3000, 512, 8, None, most, most - 5, "rest")
    assert most - 2 + 2 * drafts <= CONTEXT + 4 * (drafts == 1)


def test_a_prompt_leaves_a_page_and_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RESERVE, lambda: 8)
    pool = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(page_size=64))
    worker = SimpleNamespace(model_runner=pool)
    assert hooks.admissible((3072, 512, 8, None, 3071, 3066, "rest"), worker)[4:6] == (3064, 2945)
