"""What is unloaded by request is not loaded again by the next one that names it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.frontend.adapters import forget


@pytest.mark.parametrize(("success", "left"), [(True, {"B"}), (False, {"A", "B"})])
@pytest.mark.parametrize("loads", [False, True])
def test_an_unloaded_adapter_is_not_loaded_by_the_next_request(success: bool, left: set[str], loads: bool) -> None:
    manager = SimpleNamespace(lora_ref_cache={"A": "folder of A", "B": "folder of B"})

    async def original(manager: Any, obj: Any) -> Any:
        assert obj.lora_name not in manager.lora_ref_cache, "a request that comes meanwhile would load it again"
        if loads:
            manager.lora_ref_cache["A"] = "folder of A"  # it waited for the same lock, and was first
        return SimpleNamespace(success=success)

    answer = asyncio.run(forget(original, manager, SimpleNamespace(lora_name="A")))
    assert answer.success is success
    assert set(manager.lora_ref_cache) == left
    assert asyncio.run(forget(original, manager, SimpleNamespace(lora_name="C"))).success is success
