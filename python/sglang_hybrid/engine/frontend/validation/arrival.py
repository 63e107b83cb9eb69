"""A request as it comes, before SGLang expands it to one object per sequence: sizes, names, types."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.validation import media
from sglang_hybrid.engine.frontend.validation.limits import (
    PRIORITY,
    WEIGHT,
    given_values,
    require_integer,
    require_key,
    require_name,
    shown,
    weight,
)
from sglang_hybrid.engine.frontend.validation.sampling import require_params

_PER_PROMPT = (
    "rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_sampling_mask", "sampling_logprobs_mode",
    "return_hidden_states", "lora_path", "custom_logit_processor", "extra_key", "cache_salt", "kv_hints",
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
)  # fmt: skip
"""One value for all prompts of a request, or a list with one for each."""

_SERVERS = ("http_worker_ipc", "lora_id", "num_items_assigned", "encoder_urls", "need_wait_for_mm_inputs")
"""With these SGLang's processes tell one another where a request is; its HTTP interface takes them from anybody."""

_LISTS = ("token_ids_logprob", "multi_item_delimiter_indices", "token_indices_to_pool")
"""A list of numbers for all prompts, or a list with one such list for each."""

_NAMES = ("rid", "session_id", "conversation_id", "lora_path")
_KEYS = ("extra_key", "cache_salt", "routing_key")
_LOOSE = ("external_trace_header", "images_config", "video_config", "kv_hints", "custom_labels")
_CLOCK_S = 3_600.0


def require_arrival(obj: Any, vocabulary: int, most_sequences: int, from_client: bool) -> None:
    """Check SGLang's `GenerateReqInput` or `EmbeddingReqInput`; raises ConfigError, which SGLang answers with 400.

    Sampling parameters are replaced by those with SGLang's types. `from_client`: it came over HTTP; whoever runs SGLang
    in a process of its own may send as many sequences as it likes.
    """
    prompts, single = _prompts(obj)
    samples = _require_params(obj, prompts, single, vocabulary, most_sequences if from_client else None)
    single = single and samples == 1  # several samples of one prompt are a batch to SGLang
    for name in _PER_PROMPT:
        value = getattr(obj, name, None)
        if isinstance(value, list) and (single or len(value) != prompts):
            raise ConfigError(f"{name} is one value, or a list of one per prompt ({prompts}): {len(value)} values")
    media.require_shape(obj, prompts, single)
    _require_names(obj)
    _require_session(getattr(obj, "session_params", None))
    _require_numbers(obj, prompts, single, vocabulary)
    if (priority := getattr(obj, "priority", None)) is not None:
        require_integer(priority, -PRIORITY, PRIORITY, "priority")
    for name in _LOOSE:
        weight(getattr(obj, name, None), name)
    if from_client:
        _require_no_internals(obj)


def _prompts(obj: Any) -> tuple[int, bool]:
    """How many prompts there are, and whether the one is not in a list."""
    counts = {}
    if obj.text is not None:
        pairs = getattr(obj, "is_cross_encoder_request", False)
        if isinstance(obj.text, list) and not pairs and not all(isinstance(each, str) for each in obj.text):
            raise ConfigError(f"text is one prompt or a list of prompts: {shown(obj.text)}")
        counts["text"] = (1, True) if isinstance(obj.text, str) else (len(obj.text), False)
    if obj.input_ids is not None:
        nested = bool(obj.input_ids) and isinstance(obj.input_ids[0], list)
        if not all(obj.input_ids) if nested else not (obj.input_ids or session_of(obj)):
            raise ConfigError("every prompt of input_ids has at least one token; leave empty ones out: []")
        counts["input_ids"] = (len(obj.input_ids), False) if nested else (1, True)
    if (embeds := obj.input_embeds) is not None:
        if not (embeds and all(embeds)):
            raise ConfigError(f"input_embeds has at least one vector for every prompt: {shown(embeds)}")
        counts["input_embeds"] = (len(embeds), False) if isinstance(embeds[0][0], list) else (1, True)
    if len(set(counts.values())) > 1:
        raise ConfigError(f"give the prompts once, as text, input_ids or input_embeds: {', '.join(counts)}")
    return next(iter(counts.values()), (1, True))


def session_of(obj: Any) -> Any:
    """The id of the session that a request continues, None for none; its history may be the whole prompt."""
    return (getattr(obj, "session_params", None) or {}).get("id")


def _require_params(obj: Any, prompts: int, single: bool, vocabulary: int, most: int | None) -> int:
    """Check the sampling parameters of all prompts; returns how many requests SGLang makes of each prompt."""
    given = obj.sampling_params
    if isinstance(given, list) and (single or len(given) != prompts or not given):
        raise ConfigError(
            f"sampling_params are one object, or a list of one per prompt ({prompts}): {len(given)} objects"
        )
    each = given if isinstance(given, list) else [given or {}]
    checked = [require_params(params or {}, vocabulary) for params in each]
    if given is not None:
        made = [params for params, _ in checked]
        obj.sampling_params = made if isinstance(given, list) else made[0]
    samples = max((max(params.get("n", 1), params.get("beam_width") or 1) for params, _ in checked), default=1)
    if most is not None and prompts * samples > most:
        raise ConfigError(
            f"one request has at most {most} sequences, prompts times n (--hybrid-max-sequences); send several: "
            f"{prompts} x {samples}"
        )
    heavy = sum(heavy for _, heavy in checked) * samples * (1 if isinstance(given, list) else prompts)
    if heavy > WEIGHT:
        raise ConfigError(
            f"sampling_params hold at most {WEIGHT} values over all sequences of a request; send several requests or "
            f"smaller parameters: {heavy}"
        )
    return 1 if any(params.get("beam_width") for params, _ in checked) else samples


def _require_names(obj: Any) -> None:
    for name in _NAMES:
        for value in given_values(getattr(obj, name, None)):
            require_name(value, name)
    for name in _KEYS:
        for value in given_values(getattr(obj, name, None)):
            require_key(value, name)


def _require_session(given: Any) -> None:
    """Raise ConfigError unless the parameters of a session are SGLang's, by name and type."""
    if given is None:
        return
    from sglang.srt.managers.io_struct import SessionParams

    types = {field.name: field.type for field in msgspec.structs.fields(SessionParams)}
    for name, value in given.items():
        if name not in types:
            raise ConfigError(f"unknown session parameter; known are {', '.join(types)}: {shown(name)}")
        try:
            msgspec.convert(value, types[name])
        except (msgspec.ValidationError, RecursionError) as error:
            raise ConfigError(f"session parameter {name} has another type ({error}): {shown(value)}") from error
        if isinstance(value, str):
            require_name(value, f"session parameter {name}")
    if given.get("replace") and not given.get("rid"):  # SGLang changes a dict it walks, in the scheduler
        raise ConfigError(f"session_params.replace names the request to replace in session_params.rid: {shown(given)}")


def _require_numbers(obj: Any, prompts: int, single: bool, vocabulary: int) -> None:
    for value in given_values(getattr(obj, "top_logprobs_num", None)):
        require_integer(value, 0, vocabulary, "the number of top log-probabilities")
    for value in given_values(getattr(obj, "logprob_start_len", None)):
        require_integer(value, -1, 2**31, "logprob_start_len")
    for name in _LISTS:
        given = getattr(obj, name, None)
        nested = isinstance(given, list) and any(isinstance(each, list) for each in given)
        if nested and (single or len(given) != prompts or not all(isinstance(each, list) for each in given)):
            raise ConfigError(f"{name} is one list, or a list of one per prompt ({prompts}): {shown(given)}")


def _require_no_internals(obj: Any) -> None:
    """Raise ConfigError for fields that are for SGLang's own processes, and for a clock that is not ours."""
    for name in _SERVERS:
        if getattr(obj, name, None) is not None:
            raise ConfigError(f"{name} is set by the server; leave it out: {shown(getattr(obj, name))}")
    for each in given_values(getattr(obj, "positional_embed_overrides", None)):
        if isinstance(each, (dict, list, str, int, float)):
            raise ConfigError(f"positional_embed_overrides are set by the server; leave them out: {shown(each)}")
    received = getattr(obj, "received_time", None)
    if received is not None and not abs(received - time.monotonic()) < _CLOCK_S:
        raise ConfigError(f"received_time is the server's; leave it out: {shown(received)}")
