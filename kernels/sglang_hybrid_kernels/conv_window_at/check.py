"""What conv_window_at accepts, and what it is then called with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sglang_hybrid_kernels.arguments import (
    INTEGERS,
    require,
    require_cu_seqlens,
    require_device,
    require_dtype,
    require_shape,
    require_slots,
    require_wanted,
)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LARGEST_WIDTH = 16


@dataclass(frozen=True)
class Plan:
    """The arguments of one call, see `conv_window_at`."""

    x: Tensor
    cu_seqlens: Tensor
    sequence: Tensor
    position: Tensor
    into: Tensor
    slots: Tensor
    initial: Tensor | None
    initial_slots: Tensor | None

    def check(self, values: bool) -> None:
        """Raises ValueError; reads what lies on the device only if `values`."""
        tensors = {name: x for name, x in vars(self).items() if x is not None}
        require_device(tensors)
        require_shape("x", self.x, [None, None])
        require_shape("into", self.into, [None, self.x.shape[1], None])
        window = self.into.shape[2]
        require(window < LARGEST_WIDTH, f"into must keep fewer than {LARGEST_WIDTH} inputs per channel", window)
        for name in ("x", "into", "initial"):
            if name in tensors:
                require_dtype(name, tensors[name], FLOATS)
        given = [self.initial is not None, self.initial_slots is not None]
        require(given[0] == given[1], "give initial and initial_slots together", given)
        if self.initial is not None and self.initial_slots is not None:
            require_shape("initial", self.initial, [None, self.x.shape[1], window])
            require_shape("initial_slots", self.initial_slots, [self.cu_seqlens.numel() - 1])
        require_shape("position", self.position, [None])
        for name in ("cu_seqlens", "sequence", "position", "slots", "initial_slots"):
            if name in tensors:
                require_dtype(name, tensors[name], INTEGERS)
        for name in ("sequence", "slots"):
            require_shape(name, tensors[name], [self.position.numel()])
        if values:
            self._check_values()

    def _check_values(self) -> None:
        lengths = [hi - lo for lo, hi in pairwise(require_cu_seqlens(self.cu_seqlens, self.x.shape[0]))]
        if self.initial is not None and self.initial_slots is not None:
            require_slots("initial_slots", self.initial_slots, self.initial.shape[0])
        wanted = require_wanted(self.sequence, self.position, self.slots, lengths, self.into.shape[0])
        if (
            self.initial_slots is not None
            and self.initial is not None
            and self.initial.data_ptr() == self.into.data_ptr()
        ):
            starts = self.initial_slots.tolist()
            read, written = {starts[sequence] for sequence, *_ in wanted}, [slot for *_, slot in wanted]
            require(read.isdisjoint(written), "write to slots that no sequence asked for starts from", written)
