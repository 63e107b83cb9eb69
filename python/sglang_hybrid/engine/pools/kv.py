"""SGLang's pools of keys and values, and of latents, over an arena.

A model that drafts has a pool of its own for the same pages: the planes behind those of the target.
Page 0, where SGLang writes padding, always has memory, which reads zero at first.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from torch import Tensor

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.device.tensors import plane_tensors
from sglang_hybrid.engine.pools import arena as arenas


class ElasticKV(MHATokenToKVPool):
    """Keys and values whose memory exists while their column is in use: one contiguous plane per layer, K then V."""

    supply: Any = None

    def _create_buffers(self) -> None:
        _check(
            "keys and values of one width",
            (self.head_num * self.head_dim * self.store_dtype.itemsize, 2 * self.layer_num, self.page_size),
            self.kv_cache_layout == "nhd"
            and self.head_dim == self.v_head_dim
            and not self.post_capture_active
            and not self.is_quantized_kv_cache,
            f"{self.kv_cache_layout}, {self.head_dim}/{self.v_head_dim}",
        )
        super()._create_buffers()

    def _build_kv_buffer_descs(self) -> list[Any]:
        """None: they say how many rows of a buffer are in use, to pairs and to pools that are backed late."""
        return []

    def _create_buffers_normal(self) -> None:
        planes = _planes(self, 2 * self.layer_num, (self.head_num, self.head_dim))
        self.k_buffer, self.v_buffer = planes[: self.layer_num], planes[self.layer_num :]


class ElasticLatents(MLATokenToKVPool):
    """Latents and their rotary keys, whose memory exists while their column is in use: one contiguous plane per layer.

    Values are the front of the keys, so a layer has one tensor, [slots, 1, kv_lora_rank + qk_rope_head_dim].
    """

    supply: Any = None

    def _create_buffers(self) -> None:
        _check(
            "latents of full attention",
            (self.kv_cache_dim * self.store_dtype.itemsize, self.layer_num, self.page_size),
            not self.use_dsa,
            f"{self.kv_lora_rank} + {self.qk_rope_head_dim}",
        )
        self.kv_buffer = _planes(self, self.layer_num, (1, self.kv_cache_dim))


def _check(what: str, built: tuple[int, int, int], plain: bool, shape: str) -> None:
    """Raise ConfigError unless a pool is `plain`, and `built` (bytes, planes, page) as the budget has room for."""
    arena, (row_bytes, planes, page_tokens) = arenas.current(), built
    kinds = arena.sizing.kinds
    fits = (row_bytes, page_tokens) == (kinds.kv_row_bytes, kinds.page_tokens) and planes <= arena.kv_planes_left
    if not (plain and fits):
        raise ConfigError(
            f"elastic memory serves plain {what}, whose size was known before; add --hybrid-memory static: "
            f"{shape}, {built}"
        )


def _planes(pool: Any, count: int, row: tuple[int, ...]) -> list[Tensor]:
    """Give `pool` the supply of KV and return a tensor of shape [slots, *row] for each of its `count` planes."""
    arena = arenas.current()
    layout = arena.sizing.kv_layout
    pool.supply, first_plane, taken = arena.take_kv_planes(count)
    tokens = arena.sizing.host_tokens
    if not taken:  # of what drafts SGLang makes the tier as long as that of the target
        pool.host_capacity_tokens = tokens
    pool.host_capacity_bytes = tokens * arena.sizing.kinds.kv_row_bytes * count
    tensors = plane_tensors(arena.pooled, layout, layout.planes[0], first_plane, row, pool.store_dtype, arena.device)
    return tensors[taken : taken + count]
