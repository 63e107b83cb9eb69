"""SGLang's pool of request rows, with a short form for the batch of one request."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool


class ShortRows(HybridReqToTokenPool):  # type: ignore[misc]
    """Takes a row, a state and its track buffers for one request without making index tensors.

    They cost more than all the rest, on a GPU a copy to the device besides.
    """

    def alloc(self, reqs: list[Any]) -> Any:
        if len(reqs) != 1 or reqs[0].kv.holds_kv or not self.free_slots or self._scratch:
            return super().alloc(reqs)
        kv = reqs[0].kv
        kv.req_pool_idx = row = self.free_slots.pop()
        self.req_generation[row] += 1
        if not kv.holds_mamba:
            state = self.mamba_allocator.alloc(1)
            assert state is not None, "a request was admitted whose state cannot be had"
            kv.mamba_pool_idx, kv.mamba_needs_clear = state[0], True
        self.req_index_to_mamba_index_mapping[row] = kv.mamba_pool_idx
        if self.enable_mamba_extra_buffer:
            if kv.mamba_ping_pong_track_buffer is None:
                self._alloc_ping_pong_buffer(reqs[0])
            self.req_index_to_mamba_ping_pong_track_buffer_mapping[row] = kv.mamba_ping_pong_track_buffer
        return [row]

    @property
    def _scratch(self) -> bool:
        """Whether a row or state has more to it, which SGLang clears: rings of replayed tokens, auxiliary rows."""
        pool = self.mamba_pool
        rings = pool.replayssm_write_pos is not None or getattr(pool, "replayssm_spec_write_pos", None) is not None
        return rings or self._on_alloc_rows is not None
