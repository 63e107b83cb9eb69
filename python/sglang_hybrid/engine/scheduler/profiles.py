"""Traces that cannot be written are told of: SGLang's scheduler would end on them, in the middle of requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

logger = logging.getLogger(__name__)


def stop(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of SchedulerProfilerManager._stop_profile: a disk that is full costs the trace alone."""
    profiler = getattr(manager, "torch_profiler", None)
    if profiler is None:
        return original(manager, *args, **kwargs)
    profiler.export_chrome_trace = partial(_export, profiler.export_chrome_trace)
    try:
        return original(manager, *args, **kwargs)
    finally:
        del profiler.export_chrome_trace  # it holds the profiler


def _export(export: Callable[[str], Any], path: str) -> None:
    try:
        export(path)
    except Exception as error:  # of PyTorch, of its library, of the file system
        logger.error("the trace is lost, it cannot be written to %s: %s", path, error)
