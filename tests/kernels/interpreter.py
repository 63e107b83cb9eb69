"""A process that runs operations under Triton's interpreter; `conftest.py` starts it and talks to it.

Triton decides when it is imported whether it interprets or compiles, for every kernel of the process. The tests' own
process must compile (benchmarks/kernels/compile.py), and SGLang's kernels in it must stay what they are: hence a second
process. Frames are length-prefixed torch.save files, which keep strides, views and shared storage.
"""

from __future__ import annotations

import importlib
import io
import os
import struct
import sys
import traceback
from typing import Any, BinaryIO

import numpy as np
import torch


def dot_in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a` [..., m, k] times `b` [..., k, n]: every element is the sum over k from the first product to the last.

    A row has the same bits wherever it stands and whatever stands beside it. The host's BLAS, which the interpreter
    asks otherwise, promises no such thing, and on many CPUs it is not so.
    """
    sum_, product = np.zeros(np.broadcast_shapes(a.shape[:-1], (*b.shape[:-2], 1)) + b.shape[-1:], a.dtype), None
    for k in range(a.shape[-1]):
        product = np.multiply(a[..., k, None], b[..., k, None, :], out=product)
        sum_ += product
    return sum_


def compute_like_a_gpu() -> None:
    """Teach the interpreter the rounding of GPUs: bfloat16, which it truncates and multiplies as raw bits, and tf32,
    which it ignores; and products of matrices whose order of summation is fixed."""
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def rounded(x: np.ndarray) -> np.ndarray:
        bits = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).bfloat16().view(torch.int16)
        return bits.numpy().view(np.uint16).reshape(x.shape)

    def widened(x: np.ndarray) -> np.ndarray:
        return (x.astype(np.uint32) << 16).view(np.float32)

    def float32(handle: Any) -> Any:
        return TensorHandle(widened(handle.data), tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle

    cast, convert = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16 and src.dtype.scalar != tl.bfloat16:
            return TensorHandle(rounded(src.data), tl.bfloat16)
        return cast(self, float32(src), dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return cast_impl(self, src, dst_type)
        return convert(self, src, dst_type, rounding_mode)

    def tf32(handle: Any) -> Any:
        """Rounded to 10 bits behind the point; products of such numbers are exact in float32."""
        if handle.dtype.scalar != tl.float32:
            return handle
        bits = np.ascontiguousarray(handle.data).view(np.uint32)
        finite = np.isfinite(handle.data)
        return TensorHandle(np.where(finite, (bits + 0x1000 & 0xFFFFE000).view(np.float32), handle.data), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, *rest: Any) -> Any:
        if input_precision == ir.INPUT_PRECISION.TF32:
            a, b = tf32(a), tf32(b)
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth) and d.dtype.scalar.is_floating():
            raise NotImplementedError("products of eight-bit floats: teach them to the interpreter first")
        kind = d.data.dtype
        return TensorHandle(
            dot_in_order(float32(a).data.astype(kind), float32(b).data.astype(kind)) + d.data, d.dtype.scalar
        )

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_dot = create_dot


def send(stream: BinaryIO, message: Any) -> None:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    stream.write(struct.pack("<q", buffer.tell()) + buffer.getbuffer())
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """The next message; raises EOFError when the other side is gone."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the other process ended")
    return torch.load(io.BytesIO(stream.read(struct.unpack("<q", head)[0])), weights_only=False)


def main() -> None:
    torch.set_num_threads(1)
    compute_like_a_gpu()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a print inside a kernel must not enter the frames
    while True:
        try:
            module, name, args, kwargs = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result = getattr(importlib.import_module(module), name)(*args, **kwargs)
            send(answers, (result, args, kwargs, None))
        except Exception as error:
            error.add_note(traceback.format_exc())
            send(answers, (None, args, kwargs, error))


if __name__ == "__main__":
    main()
