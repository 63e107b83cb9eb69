"""SGLang's pools of keys and values, and of latents, over an arena.

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
        planes = _planes(self, (self.head_num, self.head_dim))
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
        self.kv_buffer = _planes(self, (1, self.kv_cache_dim))


def _check(what: str, built: tuple[int, int, int], plain: bool, shape: str) -> None:
    """Raise ConfigError unless a pool is `plain` and as large as was `built` into the budget: bytes, planes, page."""
    kinds = arenas.current().sizing.kinds
    if not plain or built != (kinds.kv_row_bytes, kinds.kv_planes, kinds.page_tokens):
        raise ConfigError(
            f"elastic memory serves plain {what}, whose size was known before; add --hybrid-memory static: "
            f"{shape}, {built}"
        )


def _planes(pool: Any, row: tuple[int, ...]) -> list[Tensor]:
    """Open the supply of `pool` and return a tensor of shape [slots, *row] for each of its planes."""
    arena = arenas.current()
    layout = arena.sizing.kv_layout
    pool.supply, first_plane = arena.open(layout)
    pool.host_capacity_tokens = arena.sizing.host_tokens
    pool.host_capacity_bytes = pool.host_capacity_tokens * arena.sizing.kinds.token_bytes
    return plane_tensors(arena.pooled, layout, layout.planes[0], first_plane, row, pool.store_dtype, arena.device)
