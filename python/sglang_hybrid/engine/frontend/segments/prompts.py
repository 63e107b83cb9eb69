"""Prompts as text with a separator between segments (`--hybrid-segment-separator`), for endpoints without messages.

The parts are tokenised by themselves and the separator is left out, so a part has the same tokens wherever it stands.
The last part is no segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.segments.tokens import ranges
from sglang_hybrid.engine.frontend.settings import settings
from sglang_hybrid.engine.frontend.validation.arrival import session_of
from sglang_hybrid.engine.frontend.validation.limits import shown
from sglang_hybrid.engine.segments import marked
from sglang_hybrid.segment.geometry import Range
from sglang_hybrid.segment.split import joined, split

PATHS = ("/generate", "/v1/completions", "/vertex_generate", "/api/generate")
"""Endpoints whose prompts are texts of a client; elsewhere a text is what a template made of one."""


def separator() -> str:
    """The text between segments, empty on a server without one."""
    return settings().segment_separator if settings().segments == "on" else ""


def divide(obj: Any, tokenizer: Any, path: str | None) -> None:
    """Replace the texts of SGLang's `GenerateReqInput` that have a separator by token ids and `custom_params`.

    `path` is the endpoint's, None for a request of the process itself. Raises ConfigError for prompts that have nothing
    but separators, too many, or ranges of the client's own beside them.
    """
    mark = separator()
    texts = [obj.text] if isinstance(obj.text, str) else obj.text
    if not mark or not texts or tokenizer is None or (path is not None and path not in PATHS):
        return
    if hasattr(obj, "is_cross_encoder_request") or not any(mark in text for text in texts):
        return
    params = obj.sampling_params
    each = params if isinstance(params, list) else [params or {}] * len(texts)
    in_session = bool(session_of(obj))
    made = [_divided(tokenizer, text, mark, given, in_session) for text, given in zip(texts, each, strict=True)]
    single = isinstance(obj.text, str)
    obj.input_ids, obj.text = made[0][0] if single else [ids for ids, _ in made], None
    obj.sampling_params = made[0][1] if single else [given for _, given in made]


def _divided(
    tokenizer: Any, text: str, mark: str, params: dict[str, Any], in_session: bool
) -> tuple[list[int], dict[str, Any]]:
    if mark not in text:
        return whole(tokenizer, text), params
    custom = dict(params.get("custom_params") or {})
    if marked.marks(custom):
        raise ConfigError(
            f"mark segments by the separator {mark!r} or by custom_params.{marked.KEY}, not by both: "
            f"{shown(custom[marked.KEY])}"
        )
    ids, found, lost = parts(tokenizer, text, mark)
    if not ids:
        raise ConfigError(f"the prompt has nothing but separators {mark!r}; put text between them: {shown(text)}")
    if in_session:  # positions would be those of the whole session
        found, lost = [], lost + len(found)
    if found:
        custom[marked.KEY] = [list(each) for each in found]
    if lost:
        custom[marked.LOST] = lost
    return ids, {**params, "custom_params": custom} if found or lost else params


def prompt(tokenizer: Any, text: str) -> list[int]:
    """The token ids of one prompt, as this server makes them."""
    mark = separator()
    return parts(tokenizer, text, mark)[0] if mark and mark in text else whole(tokenizer, text)


def parts(tokenizer: Any, text: str, mark: str) -> tuple[list[int], list[Range], int]:
    """The token ids of a prompt without its separators `mark`, its segments, and how many parts became plain text:
    those that spell special tokens."""
    texts = split(text, mark)
    lead, tail = around(tokenizer)
    ids, places = joined(texts, lambda part: alone(tokenizer, part))
    found: list[Range] = []
    for number, (start, end) in places.items():
        where = segment(tokenizer, texts[number], ids[start:end])
        if where is not None:
            found.append((len(lead) + start + where[0], len(lead) + start + where[1]))
    return ([*lead, *ids, *tail] if ids else []), found, len(places) - len(found)


def segment(tokenizer: Any, text: str, ids: Sequence[int]) -> Range | None:
    """The tokens of `text`, by itself `ids`, that are a segment wherever it stands; None if there is none."""
    return ranges(tokenizer, text, list(ids), [(0, len(text))], _ALONE)[0]


_ALONE = {"add_special_tokens": False}


def alone(tokenizer: Any, text: str) -> list[int]:
    """The tokens of `text` without what a tokenizer puts in front of a prompt and behind it."""
    return whole(tokenizer, text, **_ALONE)


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts in front of a prompt and behind it."""
    inner, outer = alone(tokenizer, "a"), whole(tokenizer, "a")
    for at in range(len(outer) - len(inner) + 1):
        if outer[at : at + len(inner)] == inner:
            return outer[:at], outer[at + len(inner) :]
    return [], []


def whole(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The tokens of a prompt, as SGLang has them; raises ConfigError for what is no text."""
    try:
        return list(tokenizer.encode(text, **options))
    except (TypeError, UnicodeError) as error:  # half of a surrogate pair, which JSON can hold
        raise ConfigError(f"a text has characters that are none of Unicode's: {shown(text)}") from error
