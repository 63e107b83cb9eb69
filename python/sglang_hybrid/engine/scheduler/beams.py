"""Beam search of a model with recurrent states is refused: SGLang forks the KV of a beam, and no state. Runs in the
scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refuse(original: Callable[..., str | None], coordinator: Any, *args: Any, **kwargs: Any) -> str | None:
    """AROUND hook of BeamCoordinator.validate_and_init: why a request cannot have beams, None if it can.

    SGLang asks the prefix cache for states, and without one (`--disable-radix-cache`) every beam but the first goes on
    from the state of whoever had its row before: wrong answers, for that request too if it still runs.
    """
    if hasattr(coordinator.req_to_token_pool, "mamba_pool"):
        return "Beam search is not supported with recurrent states, which SGLang does not fork: leave out beam_width."
    return original(coordinator, *args, **kwargs)
