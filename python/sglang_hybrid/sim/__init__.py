"""Trace-driven simulator: what would my trace get with X GB on model Y, and which policy."""

from sglang_hybrid.sim.cache import POLICIES, open_cache

__all__ = ["POLICIES", "open_cache"]
