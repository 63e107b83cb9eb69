"""Models of which SGLang caches states without having chosen when: the launcher chooses for it.

A state in a request's own slot is right until a later pass begins, so SGLang serves `no_buffer` without the overlap
schedule. For most models it sees to that by name. Some it does not name: their passes overlap, and states of prompts
and answers are cached a token late. What resumes from them is answered wrongly (docs/upstream.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_hybrid.core.served import ARCHITECTURES
from sglang_hybrid.engine.launch.flags import spelled
from sglang_hybrid.engine.launch.models import Model

FLAGS = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}


def defaults(namespace: Any, model: Model, on_cpu: bool) -> dict[str, Any]:
    """Flags to add where the user chose nothing that SGLang itself refuses; on a CPU there are none of these models."""
    row = ARCHITECTURES.get(model.architecture)
    if row is None or row.settled or on_cpu or namespace.disable_radix_cache:
        return {}
    return dict(FLAGS) if namespace.mamba_radix_cache_strategy in ("auto", "no_buffer") else {}


def note(added: Sequence[str], model: Model) -> str | None:
    """What to say where the flags are among the arguments `added` to those of the user."""
    row = ARCHITECTURES.get(model.architecture)
    if row is None or row.settled or spelled("disable_overlap_schedule") not in added:
        return None
    return (
        f"passes do not overlap ({spelled('disable_overlap_schedule')}): SGLang chooses no strategy for the states of "
        f"{model.architecture}, and would cache them a token late"
    )
