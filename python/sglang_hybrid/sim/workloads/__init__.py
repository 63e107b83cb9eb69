"""Seeded workloads: `generate("sharegpt", seed=1, sps=0.5)`, or the text `workload:sharegpt?seed=1&sps=0.5`.

The same name, seed and parameters give the same trace on every machine (numpy's PCG64).
"""

import inspect
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from sglang_hybrid.sim.trace import Request, Trace, TraceError, make_trace
from sglang_hybrid.sim.workloads import agents, chat, mixes, shifts, templates

PREFIX = "workload:"


def generate(name: str, seed: int = 0, **params: float) -> Trace:
    """A trace of workload `name`; raises TraceError for unknown names, parameters or values."""
    if name not in WORKLOADS:
        raise TraceError(f"unknown workload, choose one of {', '.join(WORKLOADS)}: {name}")
    if seed < 0:
        raise TraceError(f"a seed is a natural number, got {seed}")
    build = WORKLOADS[name]
    typed = {key: _typed(name, build, key, value) for key, value in params.items()}
    label = name + "".join(f",{key}={value:g}" for key, value in sorted(typed.items()))
    # The name is part of the seed: seed 1 of two workloads must not draw the same tokens.
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    return make_trace(f"{label}#{seed}", build(rng, **typed))


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
    known = {k: p.default for k, p in inspect.signature(build).parameters.items() if k != "rng"}
    if key not in known:
        raise TraceError(f"workload {name} has no such parameter, it takes seed, {', '.join(known)}: {key}")
    whole = isinstance(known[key], int)
    if not np.isfinite(value) or value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
        raise TraceError(f"workload parameter {key} must be positive, got {value}")
    if whole and value != int(value):
        raise TraceError(f"workload parameter {key} is a whole number, got {value}")
    return int(value) if whole else float(value)


_MAY_BE_ZERO = frozenset({"gap_sigma", "one_off", "exponent", "pause_s", "system_tokens", "tick_s", "question_tokens"})

WORKLOADS: dict[str, Callable[..., Iterator[Request]]] = {
    "lmsys": chat.lmsys,
    "sharegpt": chat.sharegpt,
    "swebench": agents.swebench,
    "agentic": agents.agentic,
    "fewshot": templates.fewshot,
    "rag": templates.rag,
    "mixed": mixes.mixed,
    "phases": mixes.phases,
    "turnover": mixes.turnover,
    **{build.__name__: build for build in shifts.KINDS},
}
