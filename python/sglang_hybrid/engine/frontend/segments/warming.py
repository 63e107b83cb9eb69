"""Segments are computed before a prompt needs them."""

from __future__ import annotations

import random
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache import hints, requests
from sglang_hybrid.engine.frontend.segments import prompts
from sglang_hybrid.engine.frontend.segments.questions import ask
from sglang_hybrid.engine.frontend.validation.limits import KEY as MOST_KEY
from sglang_hybrid.engine.frontend.validation.limits import shown
from sglang_hybrid.engine.segments import marked
from sglang_hybrid.segment.geometry import MOST_SEGMENTS

_FIELDS = ("segments", "cache_salt", "extra_key", "model")
_LEAD = 4

here: ContextVar[bool] = ContextVar("here", default=False)
"""Whether a request computes segments ahead: no other server is asked to compute them."""


async def warm(manager: Any, body: Any, request: Any = None, *, ahead: bool = False) -> dict[str, Any]:
    """Compute the segments of `body` and keep them; what is kept of each. Raises ConfigError, which names the field.

    If it is `ahead` of a request, that one tells why they were computed.
    """
    given, tenant = read(manager, body)
    from sglang.srt.managers.io_struct import GenerateReqInput

    # Behind tokens that no prompt begins with, or else a prefix that is cached might save what is to be computed.
    vocabulary = range(int(manager.model_config.vocab_size))
    prompts_ = [[*random.choices(vocabulary, k=_LEAD), *ids, ids[-1]] for ids in given]
    said = {hints.KEY: {"final": True}, **({marked.AHEAD: True} if ahead else {})}
    params = [
        {"max_new_tokens": 1, "custom_params": {marked.KEY: [[_LEAD, _LEAD + len(ids)]], **said}} for ids in given
    ]
    obj = GenerateReqInput(input_ids=prompts_, sampling_params=params, **tenant)
    token = here.set(True)
    try:
        (answers,) = [each async for each in manager.generate_request(obj, request)]
    finally:
        here.reset(token)
    namespace = requests.namespace(SimpleNamespace(**tenant))
    found = (await ask(manager, {"find": given, "namespace": namespace}))["entries"]
    return {"segments": [_said(entry, ids, done) for entry, ids, done in zip(found, given, answers, strict=True)]}


def _said(entry: dict[str, Any], ids: list[int], answer: dict[str, Any]) -> dict[str, Any]:
    """What a client is told of one of its segments: `reason` is why it was computed, or why it is not kept."""
    details = answer["meta_info"].get("cached_tokens_details") or {}
    reasons = [key.removeprefix("miss_") for key in details if key.startswith("miss_segment_")]
    why = [reason for reason in reasons if reason != "segment_seam"]
    kept = "bytes" in entry
    said = {"key": entry["key"], "tokens": len(ids), "kept": kept, "reason": why[0] if why else None}
    return {**said, "bytes": entry["bytes"]} if kept else said


def read(manager: Any, body: Any) -> tuple[list[list[int]], dict[str, str]]:
    """The token ids of each segment of `body`, and the tenant's names; raises ConfigError, which names the field."""
    if not isinstance(body, dict) or not isinstance(body.get("segments"), list):
        raise ConfigError(f"the body is an object with segments, a list of texts and lists of token ids: {shown(body)}")
    for name in body:
        if name not in _FIELDS:
            raise ConfigError(f"the body has {', '.join(_FIELDS)}; adapters have no segments: {shown(name)}")
    given = body["segments"]
    if not 0 < len(given) <= MOST_SEGMENTS:
        raise ConfigError(f"segments are 1 to {MOST_SEGMENTS} texts or lists of token ids: {len(given)}")
    tenant = {}
    for name in ("cache_salt", "extra_key"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, str) or len(value) > MOST_KEY:
            raise ConfigError(f"{name} is a text of at most {MOST_KEY} characters: {shown(value)}")
        tenant[name] = value
    made = []
    for number, each in enumerate(given):
        ids = _ids(manager, f"segments.{number}", each)
        most = manager.context_len - _LEAD - 2  # a token behind it, and one of an answer
        if len(ids) > most:
            raise ConfigError(f"segments.{number} has at most {most} tokens, to fit the context; split it: {len(ids)}")
        made.append(ids)
    return made, tenant


def _ids(manager: Any, field: str, given: Any) -> list[int]:
    if isinstance(given, str):
        if manager.tokenizer is None:
            raise ConfigError(f"{field} is a list of token ids, for this server has no tokenizer: {shown(given)}")
        ids = prompts.alone(manager.tokenizer, given)
        where = prompts.segment(manager.tokenizer, given, ids)
        if where is None:
            raise ConfigError(f"{field} is a text with tokens, none of them a special one: {shown(given)}")
        return ids[where[0] : where[1]]
    vocabulary = int(manager.model_config.vocab_size)
    if not isinstance(given, list) or not given or any(type(token) is not int for token in given):
        raise ConfigError(f"{field} is a text or a list of token ids, not an empty one: {shown(given)}")
    if not 0 <= min(given) <= max(given) < vocabulary:
        raise ConfigError(f"{field} has token ids of the vocabulary, 0 to {vocabulary - 1}: {shown(given)}")
    return list(given)
