"""Trace-driven simulator: what would my trace get with X GB on model Y, and which policy."""
