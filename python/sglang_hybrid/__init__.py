"""sglang-hybrid: an overlay on SGLang for models that mix attention with recurrent layers."""

from importlib import import_module
from typing import Any

from sglang_hybrid.core.errors import EngineDied

__all__ = ["Engine", "EngineDied"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`sglang_hybrid.Engine`, imported when somebody asks for it: everything else here needs no PyTorch."""
    if name == "Engine":
        return import_module("sglang_hybrid.engine.offline").Engine  # by name: no type checker follows it to PyTorch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
