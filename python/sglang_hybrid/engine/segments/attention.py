"""The attention layers of a batch with composed prompts: copies of interiors, and tokens at any positions over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.engine.cpu.attention import rows
from sglang_hybrid.engine.segments import latents
from sglang_hybrid.engine.segments.batch import Moves, PassBatch
from sglang_hybrid.engine.segments.store import Planes

WIDEST = 256
"""Numbers of a head that `seam_attention` takes on a GPU; latents of published models have 576."""


class AttentionPass:
    """Attention layers of one batch: the model's, or those of its head.

    `layers` are they by SGLang's numbers, `pool` its KV of them, and `kept` that of entries, layer by layer.
    `stream_slots` are the slots of SGLang's own stream; `frequencies` what keys turn by per position, with whether
    their pairs are interleaved, None for a model that rotates none. They are on the device: a pass waits for nothing.
    """

    def __init__(
        self,
        batch: PassBatch,
        kept: Planes,
        pool: Any,
        layers: Sequence[int],
        stream_slots: Tensor,
        table: Tensor,
        frequencies: tuple[Tensor, bool] | None,
    ) -> None:
        self.batch, self._kept, self._pool = batch, kept, pool
        self._layers = {layer: number for number, layer in enumerate(layers)}
        self._slots = stream_slots
        self._pages = table.flatten()[batch.attended.cells].long()
        self._own_slots = stream_slots[batch.take[batch.attended.tokens]].long()
        self._still = frequencies is None
        nothing = torch.zeros(1, dtype=torch.float64, device=stream_slots.device)
        self._frequencies, self._interleaved = frequencies or (nothing, False)

    def copy_early(self) -> None:
        """Copy what is there before the pass, for all layers at once."""
        if self.batch.early is None:
            return
        pairs = [self._pool.get_kv_buffer(layer) for layer in self._layers]
        values = [value for _, value in pairs] if self._kept.values else []  # else they are a part of the keys
        self._move(self.batch.early, self._kept.keys, self._kept.values, [key for key, _ in pairs], values)

    def run(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one layer over own and cold tokens of the stream, in this order.

        q, k, v: [tokens of the stream, heads * size], or by head; the own tokens' K and V are in SGLang's pool already.
        Returns [own and cold tokens, heads * V]. Latent attention is absorbed: one key head, whose values are the first
        part of the keys.
        """
        number, pool = self._layers[layer.layer_id], self._pool.get_kv_buffer(layer.layer_id)
        attended, making = self.batch.attended, self.batch.making
        heads, key_heads = layer.tp_q_head_num, layer.tp_k_head_num
        options = {"scale": layer.scaling, "window": seen(layer)}
        found = []
        if making is not None:
            cold_q = q[making.tokens].reshape(-1, heads, layer.qk_head_dim)
            cold_k = k[making.tokens].reshape(-1, key_heads, layer.qk_head_dim).to(pool[0].dtype)
            cold_v = v[making.tokens].reshape(-1, key_heads, layer.v_head_dim).to(pool[1].dtype)
            self._kept.keys[number][making.slots] = cold_k[making.places]
            if self._kept.values:
                self._kept.values[number][making.slots] = cold_v[making.places]
            pages = torch.arange(len(cold_k), device=q.device)
            found = [
                self._attend(
                    cold_q.to(pool[0].dtype), (cold_k, cold_v), pages, making.bounds, making.positions, making.bounds,
                    making.longest, making.rows, options,
                )
            ]  # fmt: skip
        if self.batch.late is not None:
            keys, values = (each[number : number + 1] for each in (self._kept.keys, self._kept.values))
            self._move(self.batch.late, keys, values, pool[:1], pool[1:] if values else ())
        own_q = q[attended.tokens].reshape(-1, heads, layer.qk_head_dim).to(pool[0].dtype)
        own = self._attend(
            own_q, pool, self._pages, attended.cell_bounds, attended.positions, attended.bounds, attended.longest,
            attended.rows, options,
        )  # fmt: skip
        return torch.cat([own, *found]).flatten(1).to(q.dtype)

    @staticmethod
    def _attend(
        q: Tensor,
        pool: tuple[Tensor, Tensor],
        pages: Tensor,
        page_bounds: Tensor,
        positions: Tensor,
        bounds: Tensor,
        longest: int,
        by_row: list[tuple[int, int, int, int]],
        options: dict[str, Any],
    ) -> Tensor:
        """Of tokens at any positions, over what lies in `pages` of their text; on a CPU, and of latents, row by row."""
        if is_by_row(q, options["window"]):
            attend = rows if q.device.type == "cpu" else latents.attend
            return attend(q, *pool, pages, by_row, options["scale"])
        from sglang_hybrid_kernels.seam_attention import seam_attention

        return seam_attention(
            q, *pool, pages, page_bounds, positions, bounds, longest=longest, check_slots=False, **options
        )

    def keep(self, layer: Any, k: Tensor, v: Tensor) -> None:
        """Write K and V of the own tokens to SGLang's pool."""
        tokens = self.batch.attended.tokens
        sizes = ((k, layer.qk_head_dim), (v, layer.v_head_dim))
        own = (x[tokens].reshape(-1, layer.tp_k_head_num, size) for x, size in sizes)
        self._pool.set_kv_buffer(layer, self._own_slots, *own)

    def _move(
        self,
        moves: Moves,
        from_keys: Sequence[Tensor],
        from_values: Sequence[Tensor],
        to_keys: Sequence[Tensor],
        to_values: Sequence[Tensor],
    ) -> None:
        from sglang_hybrid_kernels.rerotate_scatter import rerotate_scatter

        deltas = torch.zeros_like(moves.deltas) if self._still else moves.deltas
        rerotate_scatter(
            from_keys, to_keys, moves.source, self._slots[moves.target].long(), deltas, moves.bounds,
            self._frequencies, source_v=from_values, destination_v=to_values, interleaved=self._interleaved,
            check_slots=False,
        )  # fmt: skip


def seen(layer: Any) -> int | None:
    """How many keys a query of SGLang's attention `layer` sees, None for all."""
    window = layer.sliding_window_size
    return None if window is None or window < 0 else int(window) + 1


def is_by_row(q: Tensor, window: int | None) -> bool:
    """Whether attention of `q` is left to PyTorch, row by row."""
    return window is None and (q.device.type == "cpu" or q.shape[-1] > WIDEST)
