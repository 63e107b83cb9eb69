"""`usage.prompt_tokens_details.miss_tokens`: why prompt tokens missed, in the OpenAI endpoints' answers.

Streamed answers have it in the chunk that carries their usage. Runs in the HTTP process. SGLang's response models drop
fields they do not know, so the one that takes ours is told to keep them, and the models that contain it are rebuilt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "miss_"


class Cached(int):
    """The cached tokens of one prompt; `misses` says why the others missed. SGLang's streams keep nothing but this."""

    misses: Mapping[str, int]


def open_models() -> None:
    """Let SGLang's response models keep our field."""
    from pydantic import BaseModel
    from sglang.srt.entrypoints.openai import protocol

    protocol.PromptTokensDetails.model_config["extra"] = "allow"
    protocol.PromptTokensDetails.model_rebuild(force=True)
    for model in list(vars(protocol).values()):
        if isinstance(model, type) and issubclass(model, BaseModel) and model.__module__ == protocol.__name__:
            kinds = [str(field.annotation) for field in model.model_fields.values()]
            if any("UsageInfo" in kind or "PromptTokensDetails" in kind for kind in kinds):
                model.model_rebuild(force=True)


def explain(
    usage: Any, responses: list[dict[str, Any]], n_choices: int = 1, enable_cache_report: bool = False, **_: Any
) -> Any:
    """Add the misses of every prompt of `responses` to its usage; several choices share one prompt."""
    if not enable_cache_report:
        return usage
    return _with(usage, [_misses(r["meta_info"].get("cached_tokens_details")) for r in responses[::n_choices]])


def carry(_: Any, output: Any) -> None:
    """Let the counts of cached tokens of a batch of outputs carry their misses to the end of a stream."""
    details = getattr(output, "cached_tokens_details", None)
    if details:
        output.cached_tokens = [_carrying(*each) for each in zip(output.cached_tokens, details, strict=True)]


def explain_stream(
    usage: Any,
    *_: Any,
    cached_tokens: Mapping[int, int],
    n_choices: int = 1,
    enable_cache_report: bool = False,
    **__: Any,
) -> Any:
    """The same as `explain` for the usage at the end of a stream; choice i belongs to prompt i // `n_choices`."""
    if not enable_cache_report:
        return usage
    firsts = [count for choice, count in cached_tokens.items() if choice % n_choices == 0]
    return _with(usage, [count.misses for count in firsts if isinstance(count, Cached)])


def _carrying(count: int, details: Mapping[str, Any] | None) -> int:
    carrier = Cached(count)
    carrier.misses = _misses(details)
    return carrier


def _misses(details: Mapping[str, Any] | None) -> dict[str, int]:
    return {key.removeprefix(PREFIX): n for key, n in (details or {}).items() if key.startswith(PREFIX)}


def _with(usage: Any, misses: Sequence[Mapping[str, int]]) -> Any:
    missed: Counter[str] = Counter()
    for each in misses:
        missed.update(each)
    if missed:
        from sglang.srt.entrypoints.openai.protocol import PromptTokensDetails

        if usage.prompt_tokens_details is None:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=0)
        usage.prompt_tokens_details.miss_tokens = dict(missed)
    return usage
