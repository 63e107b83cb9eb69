"""NIXL between servers on CPUs: their pools lie in host memory.

SGLang's backend says of KV what kind of memory it is in, and writes "VRAM" for states and in every transfer. The
narrowest door is NIXL's own interface.
"""

from __future__ import annotations

from typing import Any

DEVICE, HOST = "VRAM", "DRAM"


def host_memory(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before NIXL is told of memory: it is the host's."""
    kwargs = {name: HOST if name == "mem_type" and value == DEVICE else value for name, value in kwargs.items()}
    return tuple(HOST if isinstance(each, str) and each == DEVICE else each for each in args), kwargs
