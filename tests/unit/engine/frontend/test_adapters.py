"""What is unloaded by request is not loaded again by the next one that names it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.frontend.admin import adapters
from sglang_hybrid.engine.frontend.admin.adapters import forget


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


def test_an_unload_waits_for_requests_that_are_there_alone() -> None:
    """Of one that was refused, or given up in the queue, SGLang never notes the end."""

    from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry

    async def run() -> None:
        registry = LoRARegistry()
        await registry.register(LoRARef(lora_id="1", lora_name="A", lora_path="a"))
        given = {"one": await registry.acquire("A"), "two": await registry.acquire(["A"]), "three": None}
        await registry.acquire("A")  # a prompt that was too long
        states = {rid: SimpleNamespace(obj=SimpleNamespace(lora_id=adapter)) for rid, adapter in given.items()}
        manager = SimpleNamespace(lora_registry=registry, rid_to_state=states)

        async def original(_: Any, obj: Any) -> str:
            obj.lora_id = await registry.unregister("A")
            await registry.wait_for_unload(obj.lora_id)
            return "unloaded"

        unloading = asyncio.create_task(adapters.unload(original, manager, SimpleNamespace(lora_id=None)))
        for gone in ("one", "two"):
            await asyncio.sleep(4 * adapters._LOOK_S)
            assert not unloading.done(), f"{gone} still has it"
            del states[gone]
        assert await asyncio.wait_for(unloading, 60) == "unloaded"
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
