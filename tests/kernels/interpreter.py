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

import torch


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
