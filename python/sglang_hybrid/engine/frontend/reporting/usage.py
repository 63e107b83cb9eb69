"""`usage.prompt_tokens_details`: why prompt tokens missed, and what the request wrote to the cache, in answers.

`miss_tokens` are ours, and so are `segment_tokens` of requests that mark segments. `cache_write_tokens` and
Anthropic's `cache_creation_input_tokens` count the tokens behind those that the request skipped, up to the last
checkpoint it saved. Streamed answers have them in the chunk that carries their usage; for requests with
`return_cached_tokens_details` also in `sglext.cached_tokens_details`, flat, as `miss_<reason>` and `written`, like the
native endpoint. Runs in the HTTP process. SGLang's response models drop fields they do not know, so those that take
ours are told to keep them, and the models that contain them are rebuilt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

PREFIX, WRITTEN, SEGMENTS = "miss_", "written", "segment_tokens"
_KEPT = "sglang_hybrid_cached"


class Cached(int):
    """The cached tokens of one prompt; `misses` says why the others missed. SGLang's streams keep nothing but this."""

    misses: Mapping[str, int]
    written: int
    segments: int | None

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """What SGLang dumps is read where this package is not; all that this carries stands beside it there."""
        return int, (int(self),)

    def __bool__(self) -> bool:
        """SGLang's responses endpoint says nothing of a count that is false; a cold prompt has the most to say."""
        return True


def open_models() -> None:
    """Let SGLang's response models keep our field."""
    from pydantic import BaseModel
    from sglang.srt.entrypoints.openai import protocol
    from sglang.srt.entrypoints.openai.protocol import (
        CachedTokensDetails,
        PromptTokensDetails,
        PromptTokenUsageInfo,
        ResponsesResponse,
    )

    PromptTokensDetails.model_config["extra"] = "allow"
    PromptTokensDetails.model_rebuild(force=True)
    PromptTokenUsageInfo.model_config["extra"] = "allow"
    PromptTokenUsageInfo.model_rebuild(force=True)
    CachedTokensDetails.model_config["extra"] = "allow"
    CachedTokensDetails.model_rebuild(force=True)
    if not hasattr(PromptTokenUsageInfo.__init__, "__wrapped__"):
        PromptTokenUsageInfo.__init__ = _explained(PromptTokenUsageInfo.__init__, "cached_tokens", _nested)
        CachedTokensDetails.__init__ = _explained(CachedTokensDetails.__init__, "device", _flat)
    _explain_responses(ResponsesResponse.__pydantic_decorators__.field_serializers)
    opened = [PromptTokensDetails.__name__, PromptTokenUsageInfo.__name__, CachedTokensDetails.__name__]
    for model in list(vars(protocol).values()):  # in the order of definition: what contains stands behind its parts
        if isinstance(model, type) and issubclass(model, BaseModel) and model.__module__ == protocol.__name__:
            kinds = [str(field.annotation) for field in model.model_fields.values()]
            if any(name in kind for name in opened for kind in kinds):
                model.model_rebuild(force=True)
                opened.append(model.__name__)


def _explain_responses(serializers: dict[str, Any]) -> None:
    """`/v1/responses` writes its usage in words of its own, by a serializer that SGLang 0.5.17 does not have yet."""
    found = serializers.get("_serialize_usage")
    if found is None or hasattr(found.func, "__wrapped__"):
        return
    serialize = found.func

    @wraps(serialize)
    def explained(self: Any, usage: Any, info: Any) -> Any:
        shown = serialize(self, usage, info)
        details = getattr(usage, "prompt_tokens_details", None)
        for name in ("miss_tokens", "cache_write_tokens", SEGMENTS):
            if (value := getattr(details, name, None)) is not None:
                shown["input_tokens_details"][name] = value
        return shown

    found.func = explained


def _explained(
    build: Callable[..., None], counter: str, fields_of: Callable[[Cached], dict[str, Any]]
) -> Callable[..., None]:
    """A constructor of details that SGLang calls with nothing but counts: take the misses that `counter` carries."""

    @wraps(build)
    def explained(self: Any, **fields: Any) -> None:
        count = fields.get(counter)
        build(self, **fields, **(fields_of(count) if isinstance(count, Cached) else {}))

    return explained


def _nested(count: Cached) -> dict[str, Any]:
    said = {"miss_tokens": dict(count.misses), "cache_write_tokens": count.written}
    return said if count.segments is None else {**said, SEGMENTS: count.segments}


def _flat(count: Cached) -> dict[str, Any]:
    said = {**{PREFIX + reason: tokens for reason, tokens in count.misses.items()}, WRITTEN: count.written}
    return said if count.segments is None else {**said, SEGMENTS: count.segments}


def explain(
    usage: Any, responses: list[dict[str, Any]], n_choices: int = 1, enable_cache_report: bool = False, **_: Any
) -> Any:
    """Add the misses of every prompt of `responses` to its usage; several choices share one prompt."""
    if not enable_cache_report:
        return usage
    return _with(usage, [_carrying(0, r["meta_info"].get("cached_tokens_details")) for r in responses[::n_choices]])


def carry(manager: Any, output: Any) -> None:
    """Let the counts of cached tokens of a batch of outputs carry their misses to the end of a stream.

    The scheduler says them with the first and the last output of a request (`cache.hooks.details`). The others get what
    its first had, which is kept with SGLang's record of the request.
    """
    details = getattr(output, "cached_tokens_details", None)
    if not details:
        return
    counts = list(output.cached_tokens)
    for at, (rid, said) in enumerate(zip(output.rids, details, strict=True)):
        state = manager.rid_to_state.get(rid)
        if said is not None and WRITTEN in said:
            counts[at] = _carrying(counts[at], said)
            said["device"] = _carrying(said.get("device", 0), said)
            if state is not None:
                setattr(state, _KEPT, (counts[at], said))
        elif (kept := getattr(state, _KEPT, None)) is not None:
            counts[at], details[at] = kept
    output.cached_tokens = counts


def explain_stream(
    usage: Any,
    *_: Any,
    cached_tokens: Mapping[int, int | Cached],
    n_choices: int = 1,
    enable_cache_report: bool = False,
    **__: Any,
) -> Any:
    """The same as `explain` for the usage at the end of a stream; choice i belongs to prompt i // `n_choices`."""
    if not enable_cache_report:
        return usage
    firsts = [count for choice, count in cached_tokens.items() if choice % n_choices == 0 and isinstance(count, Cached)]
    return _with(usage, firsts)


def explain_chunk(details: Any, _: Any, content: dict[str, Any]) -> Any:
    """The same for what a chunk in the middle of a stream says of its one prompt."""
    count = content["meta_info"].get("cached_tokens")
    if not isinstance(count, Cached):
        return details
    from sglang.srt.entrypoints.openai.protocol import PromptTokensDetails

    return PromptTokensDetails(cached_tokens=int(count), **_nested(count))


def anthropic(result: Any, usage: Any = None, **_: Any) -> Any:
    """The same in Anthropic's words: what was read, what was written and `input_tokens` add up to the prompt.

    Tokens of reused segments were read. They are no longer to be written where a checkpoint behind them was saved.
    Counts are numbers, as Anthropic's are; SGLang leaves those of 0 out, and who adds them up adds None.
    """
    details = getattr(usage, "prompt_tokens_details", None)
    if result.input_tokens is None or details is None:
        return result
    written, reused = (getattr(details, name, None) or 0 for name in ("cache_write_tokens", SEGMENTS))
    reused = min(reused, result.input_tokens)
    written = min(max(0, written - reused), result.input_tokens - reused)
    result.cache_read_input_tokens = (result.cache_read_input_tokens or 0) + reused
    result.cache_creation_input_tokens = written
    result.input_tokens -= reused + written
    return result


def _carrying(count: int, details: Mapping[str, Any] | None) -> Cached:
    carrier = Cached(count)
    carrier.misses = _misses(details)
    carrier.written = (details or {}).get(WRITTEN, 0)
    carrier.segments = (details or {}).get(SEGMENTS)
    return carrier


def _misses(details: Mapping[str, Any] | None) -> dict[str, int]:
    return {key.removeprefix(PREFIX): n for key, n in (details or {}).items() if key.startswith(PREFIX)}


def _with(usage: Any, counts: Sequence[Cached]) -> Any:
    missed: Counter[str] = Counter()
    for count in counts:
        missed.update(count.misses)
    if missed:
        from sglang.srt.entrypoints.openai.protocol import PromptTokensDetails

        if usage.prompt_tokens_details is None:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=0)
        usage.prompt_tokens_details.miss_tokens = dict(missed)
        usage.prompt_tokens_details.cache_write_tokens = sum(count.written for count in counts)
        if any(count.segments is not None for count in counts):
            usage.prompt_tokens_details.segment_tokens = sum(count.segments or 0 for count in counts)
    return usage
