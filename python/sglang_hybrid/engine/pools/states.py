"""SGLang's pool of recurrent states, its slot allocator and its request pool, over an arena."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.device.tensors import Rows, page_major_tensors
from sglang_hybrid.engine.pools import arena as arenas


class ElasticStates(MambaPool):
    """States whose memory exists while their column is in use; all layers of a slot lie side by side.

    Slot 0, where SGLang writes padding, always has memory, which reads zero at first.
    """

    # SGLang's fused copies and clears keep the addresses and strides of the tensors that it made, which are not these;
    # from 0.5.23 on it takes them when the pool is made.
    _conv_fuse_ok = False

    def __init__(self, *, size: int, **options: Any) -> None:
        self.owner: ElasticSlots | None = None
        self._size = size
        super().__init__(size=1, **options)  # everything that is not a state, at no cost
        arena = arenas.current()
        stock = [*self.mamba_cache.conv, self.mamba_cache.temporal]
        if not all(tensor.is_contiguous() for tensor in stock):
            raise ConfigError("states of this platform have a layout of their own; add --hybrid-memory static: conv")
        layout = arena.sizing.state_layout
        self.supply, first_plane = arena.open(layout)
        rows = [Rows(tensor.shape[0], tuple(tensor.shape[2:]), tensor.dtype) for tensor in stock]
        tensors = page_major_tensors(arena.pooled, layout, first_plane, rows, arena.device)
        # States of what is verified stay as SGLang made them: they are of requests that run, not of a slot.
        self.mamba_cache = replace(self.mamba_cache, conv=tensors[:-1], temporal=tensors[-1])
        self.host_capacity_tokens = arena.sizing.host_states
        self.host_capacity_bytes = self.host_capacity_tokens * arena.sizing.kinds.state_bytes
        self._size = size

    @property
    def size(self) -> int:
        """States in use and those that could be had: SGLang's leak check wants one sum."""
        return self._size if self.owner is None else self.owner.size

    @size.setter
    def size(self, size: int) -> None:
        self._size = size


class ElasticSlots(MambaSlotAllocator):
    """Slots of an ElasticStates. Slots in SGLang's hands plus what could be had is the size."""

    def __init__(self, supply: Any, device: str) -> None:
        self.supply = supply
        self.device = device
        self._alloc_iter = None

    @property
    def size(self) -> int:  # type: ignore[override]
        return int(self.supply.taken + self.supply.available)

    @property
    def free_slots(self) -> torch.Tensor:
        """No list of them exists."""
        return torch.empty(0, dtype=torch.int64, device=self.device)

    def available_size(self) -> int:
        return int(self.supply.available)

    def schedulable_available_size(self) -> int:
        """Whoever asks would evict states alone; what a batch needs was reserved when it was admitted."""
        return max(self.available_size(), self.supply.pool.layout.slots)

    def alloc_group_begin(self, num_reqs: int) -> None:
        """Taking slots ahead of all waiting requests would map memory that most of them do not get."""
        self._alloc_iter = None

    def _do_alloc(self, need_size: int) -> torch.Tensor | None:
        slots: torch.Tensor | None = self.supply.take(need_size)
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel():
            self.supply.give(free_index.to(torch.int64, copy=True))

    def clear(self) -> None:
        self._alloc_iter = None
        self.supply.clear()


class ElasticRequestPool(HybridReqToTokenPool):
    """SGLang's request pool with elastic states."""

    mamba_pool_cls = ElasticStates

    def _init_mamba_pool(self, *args: Any, **options: Any) -> None:
        super()._init_mamba_pool(*args, **options)
        slots = ElasticSlots(self.mamba_pool.supply, options["device"])
        self.mamba_allocator = self.mamba_pool.owner = slots
