"""What rerotate_scatter accepts, and what it is then called with."""

from __future__ import annotations

from dataclasses import dataclass

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
)

KEY_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Plan:
    """The arguments of one call."""

    source_k: tuple[Tensor, ...]
    destination_k: tuple[Tensor, ...]
    source_v: tuple[Tensor, ...]
    destination_v: tuple[Tensor, ...]
    source: Tensor
    destination: Tensor
    delta: Tensor
    segment_offsets: Tensor
    inverse_frequencies: Tensor
    interleaved: bool

    @property
    def rotary_dim(self) -> int:
        return 2 * self.inverse_frequencies.numel()

    def rotation(self) -> tuple[Tensor, Tensor]:
        """(cos, sin) [segments, rotary_dim / 2] of each segment's delta, in float64."""
        angle = self.delta.double()[:, None] * self.inverse_frequencies.double()
        return angle.cos(), angle.sin()

    def segments(self) -> Tensor:
        """[tokens] the segment of each token."""
        tokens = torch.arange(self.source.numel(), device=self.source.device)
        return torch.bucketize(tokens, self.segment_offsets[1:].to(tokens.dtype), right=True)

    def check(self, check_slots: bool) -> None:
        """Raises ValueError for anything rerotate_scatter cannot do."""
        layers = len(self.source_k)
        lengths = {
            name: len(getattr(self, name)) for name in ("source_k", "destination_k", "source_v", "destination_v")
        }
        fits = layers > 0 and lengths["destination_k"] == layers
        fits &= lengths["source_v"] == lengths["destination_v"] and lengths["source_v"] in (0, layers)
        require(fits, "give as many tensors of each kind, or no values", lengths)
        for name in lengths:
            _require_alike(name, getattr(self, name))
        for name, source, destination in (
            ("k", self.source_k, self.destination_k),
            ("v", self.source_v, self.destination_v),
        ):
            if source:
                require_shape(f"source_{name}", source[0], [None] * 3)
                require_shape(f"destination_{name}", destination[0], [None, *source[0].shape[1:]])
                require_dtype(f"destination_{name}", destination[0], (source[0].dtype,))
        require_dtype("source_k", self.source_k[0], KEY_TYPES)
        if self.source_v:
            require_shape("source_v", self.source_v[0], [None, self.source_k[0].shape[1], None])
        self._check_indices()
        if check_slots:
            self._check_slots()

    def _check_indices(self) -> None:
        tokens, segments, size = self.source.numel(), self.delta.numel(), self.source_k[0].shape[2]
        require_shape("source", self.source, [None])
        require_shape("destination", self.destination, [tokens])
        require_shape("delta", self.delta, [None])
        require_shape("segment_offsets", self.segment_offsets, [segments + 1])
        names = ("source", "destination", "delta", "segment_offsets")
        indices = {name: getattr(self, name) for name in names}
        for name, index in indices.items():
            require_dtype(name, index, INTEGERS)
        require_shape("inverse_frequencies", self.inverse_frequencies, [None])
        require(
            0 < self.rotary_dim <= size and self.inverse_frequencies.is_floating_point(),
            f"inverse_frequencies must be float, half as many as rotary dimensions, 1 to {size // 2}",
            [self.inverse_frequencies.numel(), self.inverse_frequencies.dtype],
        )
        pools = {"source_k": self.source_k[0], "destination_k": self.destination_k[0]}
        require_device({**pools, **indices, "inverse_frequencies": self.inverse_frequencies})

    def _check_slots(self) -> None:
        require_cu_seqlens(self.segment_offsets, self.source.numel())
        require_slots("source", self.source, self.source_k[0].shape[0])
        require_slots("destination", self.destination, self.destination_k[0].shape[0])
        if self.source_v:
            require_slots("source", self.source, self.source_v[0].shape[0])
            require_slots("destination", self.destination, self.destination_v[0].shape[0])
        used = (self.source >= 0) & (self.destination >= 0)
        read, written = self.source[used], self.destination[used]
        require(written.unique().numel() == written.numel(), "write each destination slot once", written.tolist()[:16])
        if {x.data_ptr() for x in self.source_k} & {x.data_ptr() for x in self.destination_k}:
            raced = torch.isin(read, written) & (read != written)
            require(not bool(raced.any()), "write no slot that another token reads", read[raced].tolist()[:16])


def _require_alike(name: str, layers: tuple[Tensor, ...]) -> None:
    layouts = {(x.dtype, tuple(x.shape), x.stride(), x.device) for x in layers}
    require(len(layouts) <= 1, f"give every layer of {name} one dtype, shape, strides and device", layouts)
    for x in layers[:1]:
        require(x.stride(-1) == 1 or x.shape[-1] == 1, f"make the last dimension of {name} contiguous", x.stride())
