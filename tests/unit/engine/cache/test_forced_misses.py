"""`SGLANG_RADIX_FORCE_MISS`: a prompt that is to miss begins from no state of another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize(("forced", "copied"), [("0", "found"), ("1", "none")])
def test_a_match_that_is_dropped_afterwards_copies_no_state(
    monkeypatch: pytest.MonkeyPatch, forced: str, copied: str
) -> None:
    from sglang.srt.mem_cache.unified_cache.components import MambaComponent

    from sglang_hybrid.engine.cache import components

    def copy(_: Any, params: Any, result: Any) -> Any:
        return result

    monkeypatch.setenv("SGLANG_RADIX_FORCE_MISS", forced)
    monkeypatch.setattr(MambaComponent, "finalize_match_result_in_cache", copy)
    monkeypatch.setattr(components, "zero_match_result", lambda cache, result, extra_key: "none")
    monkeypatch.setattr(components.HybridMamba, "_can_copy", lambda *_: True)
    component = components.HybridMamba.__new__(components.HybridMamba)
    component.cache = SimpleNamespace()
    params = SimpleNamespace(cow_mamba=True, req=object(), key=SimpleNamespace(extra_key=None))
    assert component.finalize_match_result_in_cache(params, "found") == copied
    assert component.finalize_match_result_in_cache(SimpleNamespace(cow_mamba=False), "found") == "found"
