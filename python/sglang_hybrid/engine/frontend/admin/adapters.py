"""Adapters (LoRA): what is unloaded goes when nobody has it any more, and stays unloaded until it is loaded again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

_LOOK_S = 0.2
"""So often is looked whether a request has the adapter. One that gets it says so within a few steps of the loop."""


async def forget(original: Callable[..., Awaitable[Any]], manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of TokenizerManager.unload_lora_adapter: the next request of that name is refused.

    SGLang remembers where an adapter came from, to load it again after it made room for others. It does the same after
    it was told to unload it: under load the old weights are back before new ones can be loaded under the name.
    """
    known = manager.lora_ref_cache
    adapter = known.pop(obj.lora_name, None)
    answer = await original(manager, obj, *args, **kwargs)
    if answer.success:
        known.pop(obj.lora_name, None)  # a load that had begun before
    elif adapter is not None:
        known.setdefault(obj.lora_name, adapter)
    return answer


async def unload(original: Callable[..., Awaitable[Any]], manager: Any, obj: Any) -> Any:
    """AROUND hook of TokenizerManager._unload_lora_adapter_locked: wait for the requests that have the adapter alone.

    SGLang counts them, and misses the end of those that it gave up before they ran: of clients that hung up, of prompts
    that were refused. It would wait for ever, and so would every later load.
    """
    recounting = asyncio.create_task(_recount(manager, obj))
    try:
        return await original(manager, obj)
    finally:
        recounting.cancel()


async def _recount(manager: Any, obj: Any) -> None:
    unused = 0
    while True:
        await asyncio.sleep(_LOOK_S)
        counter = manager.lora_registry._counters.get(obj.lora_id)
        if counter is None:  # it is not known yet which adapter has the name
            continue
        used = any(_has(state.obj, obj.lora_id) for state in manager.rid_to_state.values())
        unused = 0 if used else unused + 1
        if unused > 1:
            await counter.decrement(counter.value())


def _has(request: Any, adapter: str) -> bool:
    given = getattr(request, "lora_id", None)
    return adapter in given if isinstance(given, list) else given == adapter
