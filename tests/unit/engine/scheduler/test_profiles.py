"""A trace that cannot be written is lost, the scheduler is not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.scheduler import profiles


def test_a_disk_that_is_full_costs_the_trace_alone(caplog: pytest.LogCaptureFixture) -> None:
    def full(path: str) -> None:
        raise OSError("No space left on device")

    profiler = type("Profiler", (), {"export_chrome_trace": lambda _, path: full(path)})()
    manager = SimpleNamespace(torch_profiler=profiler)

    def original(manager: Any, stage: str) -> str:
        manager.torch_profiler.export_chrome_trace("/tmp/a.trace.json.gz")
        return f"stopped {stage}"

    with caplog.at_level(logging.ERROR):
        assert profiles.stop(original, manager, "DECODE") == "stopped DECODE"
    assert vars(profiler) == {}, "what holds the profiler is gone"
    assert "cannot be written to /tmp/a.trace.json.gz: No space left" in caplog.text
    assert profiles.stop(lambda _: "not in progress", SimpleNamespace()) == "not in progress"
