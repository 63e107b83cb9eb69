"""`usage.prompt_tokens_details.miss_tokens`: why prompt tokens missed, in the OpenAI endpoints' answers (not streamed).

Runs in the HTTP process. SGLang's response models drop fields they do not know, so the one that takes ours is told to
keep them, and the models that contain it are rebuilt.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

PREFIX = "miss_"
TARGET = "sglang.srt.entrypoints.openai.usage_processor.UsageProcessor.calculate_response_usage"


def register() -> list[str]:
    """Open the response models, register the hook with SGLang's HookRegistry and return its target."""
    from pydantic import BaseModel
    from sglang.srt.entrypoints.openai import protocol
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    protocol.PromptTokensDetails.model_config["extra"] = "allow"
    protocol.PromptTokensDetails.model_rebuild(force=True)
    for model in list(vars(protocol).values()):
        if isinstance(model, type) and issubclass(model, BaseModel) and model.__module__ == protocol.__name__:
            kinds = [str(field.annotation) for field in model.model_fields.values()]
            if any("UsageInfo" in kind or "PromptTokensDetails" in kind for kind in kinds):
                model.model_rebuild(force=True)
    HookRegistry.register(TARGET, explain, HookType.AFTER)
    return [TARGET]


def explain(
    usage: Any, responses: list[dict[str, Any]], n_choices: int = 1, enable_cache_report: bool = False, **_: Any
) -> Any:
    """Add the misses of every prompt of `responses` to its usage; several choices share one prompt."""
    if not enable_cache_report:
        return usage
    missed: Counter[str] = Counter()
    for response in responses[::n_choices]:
        for key, count in (response["meta_info"].get("cached_tokens_details") or {}).items():
            if key.startswith(PREFIX):
                missed[key.removeprefix(PREFIX)] += count
    if missed:
        from sglang.srt.entrypoints.openai.protocol import PromptTokensDetails

        if usage.prompt_tokens_details is None:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=0)
        usage.prompt_tokens_details.miss_tokens = dict(missed)
    return usage
