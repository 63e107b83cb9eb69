"""Seeded workloads: `generate("sharegpt", seed=1, sps=0.5)`, or the text `workload:sharegpt?seed=1&sps=0.5`.

The same name, seed and parameters give the same trace on every machine (numpy's PCG64).
"""

import inspect
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from sglang_hybrid.sim.trace import Trace, TraceError, TraceRequest, make_trace
from sglang_hybrid.sim.workloads import agents, chat, mixes, segments, shifts, templates
from sglang_hybrid.sim.workloads.said import said

PREFIX = "workload:"


def generate(name: str, seed: int = 0, **params: float) -> Trace:
    """A trace of workload `name`; raises TraceError for unknown names, parameters or values."""
    if name not in WORKLOADS:
        raise TraceError(f"unknown workload, choose one of {', '.join(WORKLOADS)}: {name}")
    if seed < 0:
        raise TraceError(f"a seed is a natural number, got {seed}")
    build = WORKLOADS[name]
    typed = {key: _typed(name, said if key in _SAID else build, key, value) for key, value in params.items()}
    label = name + "".join(f",{key}={value:g}" for key, value in sorted(typed.items()))
    # The name is part of the seed: seed 1 of two workloads must not draw the same tokens.
    number = zlib.crc32(name.encode())
    requests = build(np.random.default_rng([number, seed]), **{k: v for k, v in typed.items() if k not in _SAID})
    if any(key in _SAID for key in typed):
        spoken = {key: value for key, value in typed.items() if key in _SAID}
        requests = iter(said(np.random.default_rng([number, seed, 1]), requests, **spoken))
    return make_trace(f"{label}#{seed}", requests)


def parse(text: str, default_seed: int = 0) -> Trace:
    """The trace named by `workload:NAME?seed=1&param=value` (the prefix may be missing); raises TraceError."""
    name, _, query = text.removeprefix(PREFIX).partition("?")
    params: dict[str, float] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        try:
            params[key] = float(value)
        except ValueError as error:
            raise TraceError(f"workload parameters are numbers, {key} is {value!r}") from error
    seed = params.pop("seed", float(default_seed))
    if seed != int(seed):
        raise TraceError(f"a seed is a natural number, got {seed}")
    return generate(name, int(seed), **params)


def _typed(name: str, build: Callable[..., Any], key: str, value: float) -> float:
    known = _parameters(build)
    if key not in known:
        takes = ", ".join([*known, *_SAID])
        raise TraceError(f"workload {name} has no such parameter, it takes seed, {takes}: {key}")
    whole = isinstance(known[key], int)
    if not np.isfinite(value) or value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
        raise TraceError(f"workload parameter {key} must be positive, got {value}")
    if whole and value != int(value):
        raise TraceError(f"workload parameter {key} is a whole number, got {value}")
    return int(value) if whole else float(value)


def _parameters(build: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(build).parameters.items()
    return {name: parameter.default for name, parameter in parameters if name not in ("rng", "trace")}


_SAID = tuple(_parameters(said))
_MAY_BE_ZERO = frozenset(
    {
        *("gap_sigma", "one_off", "exponent", "pause_s", "system_tokens", "tick_s", "question_tokens", "again"),
        *("fixed", "load", *_SAID),
    }
)

WORKLOADS: dict[str, Callable[..., Iterator[TraceRequest]]] = {
    "lmsys": chat.lmsys,
    "sharegpt": chat.sharegpt,
    "swebench": agents.swebench,
    "agentic": agents.agentic,
    "fewshot": templates.fewshot,
    "rag": templates.rag,
    "documents": segments.documents,
    "skills": segments.skills,
    "mixed": mixes.mixed,
    "phases": mixes.phases,
    "turnover": mixes.turnover,
    **{build.__name__: build for build in shifts.KINDS},
}
