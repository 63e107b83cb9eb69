"""Pages of one kind as SGLang takes and frees them: tensors of ids, in front of a supply of `memory`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_hybrid.engine.pools.copies import Begin, OnHost, send
from sglang_hybrid.memory.budget import Budget
from sglang_hybrid.memory.meter import Meter
from sglang_hybrid.memory.pool import Pool
from sglang_hybrid.memory.supply import Agreement, PageSupply


class Supply(PageSupply):
    """A supply whose pages go to SGLang on `device`, and come back by copies that `begin_copy` begins."""

    def __init__(
        self,
        budget: Budget,
        pool: Pool,
        device: torch.device,
        tidy: Callable[..., None],
        grown: Meter,
        ranks: Agreement | None = None,
        begin_copy: Begin = OnHost,
        passes: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(budget, pool, tidy, grown, ranks, passes)
        self.device = device
        self._begin_copy = begin_copy

    def take(self, count: int) -> torch.Tensor | None:
        """`count` pages, int64 on the device, held ones first; None if the rest cannot be had."""
        pages = self.hand_out(count)
        return None if pages is None else send(pages, self.device)

    def give(self, pages: torch.Tensor) -> None:
        """SGLang frees `pages`, a tensor that nobody changes any more."""
        self.take_back(self._begin_copy(pages), pages.numel())
