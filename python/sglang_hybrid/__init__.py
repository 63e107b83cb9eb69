"""sglang-hybrid: an overlay on SGLang for models that mix attention with recurrent layers."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`sglang_hybrid.Engine`, imported when somebody asks for it: everything else here needs no PyTorch."""
    if name == "Engine":
        from sglang_hybrid.engine.offline import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
