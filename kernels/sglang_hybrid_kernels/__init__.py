"""Kernels of sglang-hybrid: one folder per operation, `naive.py` is the specification."""
