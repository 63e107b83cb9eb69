"""The check of a request's boundaries, in the HTTP process."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.engine.cache.boundaries import named

VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"


def register() -> list[str]:
    """Register the check with SGLang's HookRegistry and return its target."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(VALIDATE, validate, HookType.BEFORE)
    return [VALIDATE]


def validate(_: Any, obj: Any, input_ids: Any) -> None:
    """Refuse a request whose boundaries lie outside its prompt, with status 400 and for that request alone."""
    sampling = getattr(obj, "sampling_params", None)
    if isinstance(sampling, dict) and input_ids is not None:
        named(sampling.get("custom_params"), len(input_ids))
