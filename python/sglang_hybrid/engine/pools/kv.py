"""SGLang's pool of keys and values over an arena."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.device.tensors import plane_tensors
from sglang_hybrid.engine.pools import arena as arenas


class ElasticKV(MHATokenToKVPool):
    """Keys and values whose memory exists while their column is in use: one contiguous plane per layer, K then V.

    Page 0, where SGLang writes padding, always has memory, which reads zero at first.
    """

    supply: Any = None

    def _create_buffers(self) -> None:
        kinds = arenas.current().sizing.kinds
        row_bytes = self.head_num * self.head_dim * self.store_dtype.itemsize
        built = (row_bytes, 2 * self.layer_num, self.page_size)
        if (
            self.kv_cache_layout != "nhd"
            or self.head_dim != self.v_head_dim
            or self.post_capture_active
            or self.is_quantized_kv_cache
            or built != (kinds.kv_row_bytes, kinds.kv_planes, kinds.page_tokens)
        ):
            raise ConfigError(
                "elastic memory serves plain keys and values of one width, whose size was known before; add "
                f"--hybrid-memory static: {self.kv_cache_layout}, {self.head_dim}/{self.v_head_dim}, {built}"
            )
        super()._create_buffers()

    def _build_kv_buffer_descs(self) -> list[Any]:
        """None: they say how many rows of a buffer are in use, to pairs and to pools that are backed late."""
        return []

    def _create_buffers_normal(self) -> None:
        arena = arenas.current()
        layout = arena.sizing.kv_layout
        self.supply, first_plane = arena.open(layout)
        self.host_capacity_tokens = arena.sizing.host_tokens
        self.host_capacity_bytes = self.host_capacity_tokens * arena.sizing.kinds.token_bytes
        row = (self.head_num, self.head_dim)
        planes = plane_tensors(arena.pooled, layout, layout.planes[0], first_plane, row, self.store_dtype, arena.device)
        self.k_buffer, self.v_buffer = planes[: self.layer_num], planes[self.layer_num :]
