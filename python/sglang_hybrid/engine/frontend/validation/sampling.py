"""Sampling parameters, checked as they come: SGLang hands most of them on unseen, and a wrong type ends a process.

The types are those SGLang declares for its `SamplingParams`, whatever its version.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.validation.limits import (
    BIAS,
    GRAMMAR,
    LEAST_REPETITION_PENALTY,
    STOP,
    STOPS,
    TAG,
    TOP_K,
    require_integer,
    shown,
    weight,
)
from sglang_hybrid.engine.frontend.validation.stop_patterns import require_cheap

INTERNAL = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}
"""Fields that SGLang fills itself."""

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_SCALARS = (bool, int, float)
_INT64 = 2**63 - 1


def require_params(given: dict[str, Any], vocabulary: int) -> tuple[dict[str, Any], int]:
    """The parameters with numbers that came as texts made numbers, and their weight (see `limits.WEIGHT`).

    Raises ConfigError for an unknown name, a wrong type, or a value that could harm other requests.
    """
    heavy = weight(given, "sampling_params")
    typed = _typed(given)
    params = {name: value for name, value in typed.items() if value is not None}
    require_integer(params.get("n", 1), 1, _INT64, "n")
    require_integer(params.get("top_k", 1), -1, TOP_K, "top_k")
    for name in ("max_new_tokens", "min_new_tokens"):
        require_integer(params.get(name, 0), 0, _INT64, name)
    if "stream_interval" in params:
        require_integer(params["stream_interval"], 1, _INT64, "stream_interval")
    if params.get("repetition_penalty", 1.0) < LEAST_REPETITION_PENALTY:
        raise ConfigError(
            f"repetition_penalty is at least {LEAST_REPETITION_PENALTY}: {shown(params['repetition_penalty'])}"
        )
    _require_stops(params, vocabulary)
    _require_biases(params.get("logit_bias") or {}, vocabulary)
    for name in _GRAMMARS:
        most = TAG if name == "structural_tag" else GRAMMAR
        if len(params.get(name) or "") > most:
            tools = "; strict tools make one of their schemas, send fewer of them" if most is TAG else ""
            raise ConfigError(f"{name} has at most {most} characters{tools}: {len(params[name])}")
    if typed.get("n", 1) is None:
        del typed["n"]  # SGLang compares it with a number
    return typed, heavy


def _typed(given: dict[str, Any]) -> dict[str, Any]:
    types = _types()
    found = {}
    for name, value in given.items():
        if name not in types or name in INTERNAL:
            raise ConfigError(f"unknown sampling parameter; known are {', '.join(sorted(types))}: {shown(name)}")
        found[name] = value if value is None else _convert(name, value, types[name])
    return found


def _convert(name: str, value: Any, kind: Any) -> Any:
    if name == "stop_token_ids" and isinstance(value, (list, tuple, set)):
        value = [each for each in value if each is not None]  # SGLang leaves them out too
    if name == "logit_bias" and isinstance(value, dict):
        value = {str(token): bias for token, bias in value.items()}
    try:
        made = msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"sampling parameter {name} has another type ({error}): {shown(value)}") from error
    return made if isinstance(made, _SCALARS) else value


@functools.cache
def _types() -> dict[str, Any]:
    """The type of each parameter that a client may set; `custom_params` are whatever JSON object it likes."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    types = {field.name: field.type for field in msgspec.structs.fields(SamplingParams) if field.name not in INTERNAL}
    return {**types, "custom_params": dict[str, Any] | None}


def _require_stops(params: dict[str, Any], vocabulary: int) -> None:
    stops = params.get("stop") or []
    texts = [stops] if isinstance(stops, str) else stops
    if len(texts) > STOPS or max(map(len, texts), default=0) > STOP:
        raise ConfigError(
            f"stop has at most {STOPS} texts of {STOP} characters: {len(texts)} of up to {max(map(len, texts))}"
        )
    ids = [int(each) for each in params.get("stop_token_ids") or ()]
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ConfigError(f"stop_token_ids are tokens of the vocabulary, 0 to {vocabulary - 1}: {shown(ids)}")
    if patterns := params.get("stop_regex"):
        require_cheap(patterns)


def _require_biases(biases: dict[Any, Any], vocabulary: int) -> None:
    for token, bias in biases.items():
        if not str(token).isdecimal() or int(token) >= vocabulary:
            raise ConfigError(f"logit_bias names tokens of the vocabulary, 0 to {vocabulary - 1}: {shown(token)}")
        if not abs(float(bias)) <= BIAS:
            raise ConfigError(f"logit_bias is a number within {BIAS:g} of zero: {shown(bias)}")
