"""The event loop that overlaps scheduling with forward passes, which GPUs have by default."""

from __future__ import annotations

from typing import Any


def stay_as_asked(server_args: Any) -> None:
    """REPLACE hook of _disable_overlap_schedule_for_cpu, which turns the loop off where something speculates.

    It is off on a CPU unless `--hybrid-cpu-event-loop overlap` asks for it, to try what a GPU does.
    """
