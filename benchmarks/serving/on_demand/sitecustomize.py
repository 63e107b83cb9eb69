"""Loaded by a server's processes at their start: memory is created when it is needed (baseline of `--part stalls`)."""

from sglang_hybrid.device.prefault import Prefaulter

Prefaulter.start = lambda prefaulter: None  # type: ignore[method-assign]
