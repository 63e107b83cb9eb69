"""An adapter (LoRA) that was unloaded stays unloaded until it is loaded again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


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
