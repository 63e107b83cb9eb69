"""Page-locked memory does not exist without an accelerator, and SGLang asks for it here and there without checking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Pageable(TorchFunctionMode):
    """While entered, the calling thread gets ordinary memory where it asks PyTorch for page-locked memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))


def without_pinning(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of what pins: bookkeeping of the extra buffer, and adapters."""
    with Pageable():
        return original(*args, **kwargs)
