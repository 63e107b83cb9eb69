"""SGLang's allocators of KV pages over an arena: same ids, same kernels, pages drawn when they are needed."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.utils import get_num_new_pages

from sglang_hybrid.engine.pools import arena as arenas
from sglang_hybrid.engine.pools.memory import memory_of


class _Elastic:
    """What both allocators share. What may leave for a page is asked of the cache's memory."""

    page_size: int
    device: str
    free_group: list[torch.Tensor] | None

    def _open(self, kvcache: Any) -> None:
        self.supply = getattr(kvcache, "full_kv_pool", kvcache).supply

    @property
    def size(self) -> int:
        """Tokens in SGLang's hands and those that could be had: its leak check wants one sum."""
        return int((self.supply.taken + self.supply.available) * self.page_size)

    @size.setter
    def size(self, size: int) -> None:
        """SGLang states the reach; the supply knows it."""

    @property
    def budget_bytes(self) -> int:
        """Bytes for KV and states together."""
        return int(self.supply.budget.total * self.supply.budget.granule_bytes)

    def available_size(self) -> int:
        return int(self.supply.available * self.page_size)

    def get_all_free_pages(self) -> None:
        """No list of them exists."""

    def merge_and_sort_free(self) -> None:
        """Nothing waits to be merged."""

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> None:
        memory_of(tree_cache).make_room(-(-num_tokens // self.page_size))

    def check_decode_capacity(self, *, num_tokens: int, tree_cache: Any, **_: Any) -> bool:
        return memory_of(tree_cache).secure_decode(-(-num_tokens // self.page_size))

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> PrefillBudget:
        return ElasticPrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def verify_byte_accounting(self) -> list[str]:
        """SGLang asks when it is idle."""
        return arenas.current().violations()


class ElasticPrefillBudget(PrefillBudget):
    """Evictable states are KV that could be had: the bytes are the same."""

    def _available_and_evictable(self) -> int:
        return int(super()._available_and_evictable()) + memory_of(self.tree_cache).tokens_in_states()


class ElasticTokens(_Elastic, TokenToKVPoolAllocator):
    """Pages of one token."""

    def __init__(self, size: int, *, kvcache: Any, **options: Any) -> None:
        self._open(kvcache)
        super().__init__(size, kvcache=kvcache, **options)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        pages: torch.Tensor | None = self.supply.take(need_size)
        return pages

    def free(self, free_index: torch.Tensor) -> None:
        if not free_index.numel():
            return
        if self.free_group is not None:
            self.free_group.append(self._copy_for_free_group(free_index))
        else:
            self.supply.give(self._copy_for_free_group(free_index))

    def clear(self) -> None:
        self.free_group = None
        self.supply.clear()


class ElasticPages(_Elastic, PagedTokenToKVPoolAllocator):
    """Pages of several tokens: SGLang's kernels take exactly the pages they need from `free_pages`.

    On a CPU `super()` is what engine/cpu/pages.py put in SGLang's place.
    """

    def __init__(self, size: int, *, kvcache: Any, **options: Any) -> None:
        self._open(kvcache)
        super().__init__(size, kvcache=kvcache, **options)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if not self._draw(need_size // self.page_size):
            return None
        tokens: torch.Tensor | None = super().alloc(need_size)
        return tokens

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu)
        if not self._draw(int(pages)):
            return None
        given: torch.Tensor | None = super().alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, *args, **kwargs
        )
        return given

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        if not self._draw(int(get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True))):
            return None
        given: torch.Tensor | None = super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        return given

    def clear(self) -> None:
        self.free_group = None
        self.free_page_ids_group: list[torch.Tensor] = []
        self.free_pages = torch.empty(0, dtype=torch.int64, device=self.device)
        self.staged_pages: list[torch.Tensor] = []
        self.num_staged_pages = 0
        self.supply.clear()

    def _draw(self, pages: int) -> bool:
        """Put `pages` into SGLang's list, which is empty between calls; whether they could be had."""
        drawn = self.supply.take(pages)
        if drawn is None:
            return False
        self.free_pages = drawn
        return True

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        for ids in page_ids:
            if ids.numel():
                self.supply.give(ids)
