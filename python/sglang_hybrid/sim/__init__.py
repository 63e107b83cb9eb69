"""Trace-driven simulator: what would my trace get with X GB on model Y, and which policy.

From Python: `read_trace` or `generate` give a `Trace`, `open_cache` a cache, `replay` runs one through the other.
"""

from sglang_hybrid.prefix.policies import POLICIES
from sglang_hybrid.sim.cache import open_cache
from sglang_hybrid.sim.readers import read_trace
from sglang_hybrid.sim.replay import Replay, replay
from sglang_hybrid.sim.trace import Trace, TraceError, TraceRequest
from sglang_hybrid.sim.workloads import generate

__all__ = [
    "POLICIES",
    "Replay",
    "Trace",
    "TraceError",
    "TraceRequest",
    "generate",
    "open_cache",
    "read_trace",
    "replay",
]
