"""CUDA graphs of prefills: none with a model whose recurrent layers SGLang would capture in them.

Those of most models run between the pieces of such a graph, by the index sets of the running pass. Those of a few are
captured with the index sets of the capture, which are freed by the next one: the first request ends the server, or is
answered wrongly (docs/upstream.md). A model of the hub is not known here; `cache.passes.captured` sees to it in the
scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.served import ARCHITECTURES
from sglang_hybrid.engine.launch.flags import spelled
from sglang_hybrid.engine.launch.models import Model

_BACKEND = "cuda_graph_backend_prefill"
_NONE = "disabled"
_OFF = ("disable_prefill_cuda_graph", "disable_cuda_graph")


def defaults(namespace: Any, model: Model, on_cpu: bool) -> dict[str, Any]:
    """Flags to add where the user said nothing of such graphs."""
    return {_BACKEND: _NONE} if _is_captured(model, on_cpu) and _asked(namespace) is None else {}


def check(namespace: Any, model: Model, on_cpu: bool) -> None:
    """Raise ConfigError if SGLang's final settings in `namespace` ask for such a graph."""
    asked = _asked(namespace)
    if asked is None or asked[1] == _NONE or not _is_captured(model, on_cpu):
        return
    raise ConfigError(
        f"SGLang captures the Mamba-2 layers of {model.architecture} in the CUDA graph of a prefill, by numbers that "
        "are freed before the first request, which ends the server or is answered wrongly; drop it or use "
        f"{spelled(_BACKEND)} {_NONE}: {asked[0]}"
    )


def note(added: Sequence[str], model: Model) -> str | None:
    """What to say where the flag is among the arguments `added` to those of the user."""
    if spelled(_BACKEND) not in added:
        return None
    return (
        f"prefills run without CUDA graphs ({spelled(_BACKEND)} {_NONE}): SGLang would capture the Mamba-2 layers of "
        f"{model.architecture} in them, and the first request would end the server or be answered wrongly"
    )


def _is_captured(model: Model, on_cpu: bool) -> bool:
    row = ARCHITECTURES.get(model.architecture)
    return row is not None and row.captured and not on_cpu


def _asked(namespace: Any) -> tuple[str, str] | None:
    """The argument that decides, in SGLang's order, as it is written, and the value; None where the user gave none."""
    phases = getattr(namespace, "cuda_graph_config", None) or {}
    backend = (phases.get("prefill") or {}).get("backend")
    if backend is not None:
        return f"--cuda-graph-config '{json.dumps({'prefill': {'backend': backend}})}'", backend
    backend = getattr(namespace, _BACKEND, None)
    if backend is not None:
        return f"{spelled(_BACKEND)} {backend}", backend
    return next(((spelled(name), _NONE) for name in _OFF if getattr(namespace, name, False)), None)
