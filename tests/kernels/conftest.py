"""Runs an operation's Triton kernels on CPU tensors, in a process of their own under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels import interpreter as frames
from tests.kernels.tensors import whole

SCRIPT = frames.__file__


class Interpreter:
    """Calls operations in the interpreting process."""

    def __init__(self) -> None:
        mode = {"TRITON_INTERPRET": "1", "SGLANG_HYBRID_KERNELS": "triton", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **mode}
        )

    def __call__(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """The result of `operation` (its folder's name, or module:function) on these arguments.

        What the operation writes into its arguments is written into the caller's tensors, whole storages at a time, so
        that a write outside a view shows. Its exceptions are raised here.
        """
        module, _, name = operation.partition(":")
        frames.send(self.process.stdin, (f"sglang_hybrid_kernels.{module}", name or module, args, kwargs))
        result, args_after, kwargs_after, error = frames.receive(self.process.stdout)
        if error is not None:
            raise error
        for before, after in zip(_tensors((args, kwargs)), _tensors((args_after, kwargs_after)), strict=True):
            whole(before).copy_(whole(after))
        return result

    def close(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0, self.process.returncode


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [tensor for item in value for tensor in _tensors(item)] if not isinstance(value, _LEAVES) else []


_LEAVES = (str, int, float, bool, type(None), torch.dtype)


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreter]:
    """interpreted("copy_slots", pools, ...) runs the operation's Triton kernels."""
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()
