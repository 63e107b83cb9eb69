"""Loaded by a server's processes at their start: memory is created when it is needed (baseline of `--part stalls`)."""

from sglang_hybrid.device.prefill import Prefiller

Prefiller.start = lambda prefiller: None  # type: ignore[method-assign]
