"""Kernels of sglang-hybrid: one folder per operation, `naive.py` is the specification.

    from sglang_hybrid_kernels.copy_slots import copy_slots

An operation's folder exports one function of the operation's name. `check.py` refuses bad input with a ValueError
before anything runs, `naive.py` computes in PyTorch on any device and in any precision up to float64, `triton.py` holds
the kernels and their launch. `dispatch.py` says which of the two a call takes. Importing this package imports neither
torch nor triton; triton is imported by the first call that needs it, so a machine without it serves the naive path.
"""
