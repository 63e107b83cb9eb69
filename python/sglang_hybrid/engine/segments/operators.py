"""What segments do to states, as a pass makes them: into their entries, transitions only where they have not vanished.

The transitions of an entry that stay are put into its slots one after the other, layer by layer, so that the others'
are given back by their number alone (`settling`). Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_hybrid.engine.segments.batch import Making
from sglang_hybrid.engine.segments.store import Layer


class Operators:
    """Of the segments `making`; `made` is told how many transitions of each stay ([segments]) behind layer `layers`.

    `adds`, for study: a segment leaves the states before it as they are, T is the identity.
    """

    def __init__(self, making: Making, layers: int, made: Callable[[Tensor], None], adds: bool = False) -> None:
        self._making, self._adds, self._made = making, adds, made
        self._layers = layers
        self._each = torch.arange(making.blocks.numel(), device=making.blocks.device)
        self._each_head = torch.arange(making.transitions.numel() // layers, device=making.blocks.device)
        self._stay = torch.zeros_like(making.blocks)

    def store(self, layer: Layer, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> None:
        """Of the next layer, whose inputs are [interior tokens, heads, ...] as `chunk_transition` takes them."""
        from sglang_hybrid_kernels.chunk_transition import chunk_transition

        making, count = self._making, self._each.numel()
        heads, values, keys = layer.end_state.shape[1:]
        end_state = k.new_empty(count, heads, values, keys, dtype=torch.float32)
        shape = (count, heads) if layer.transition_rows is None else (count, heads, keys, keys)
        transition = torch.empty(shape, dtype=torch.float32, device=k.device)
        vanishing = torch.empty(count, heads, dtype=torch.bool, device=k.device)
        chunk_transition(
            k, v, g, beta, making.interior_bounds, self._each, end_state, transition, vanishing=vanishing,
            delta=beta is not None, check_slots=False,
        )  # fmt: skip
        if self._adds:
            transition[:] = 1 if transition.dim() == 2 else torch.eye(keys, device=k.device)
            vanishing[:] = False
        keep(end_state, self._each, layer.end_state, layer.end_state_scale, making.blocks)
        if layer.transition_rows is None:
            layer.transition[making.blocks] = transition
        else:
            rows = self._rows(~vanishing)
            layer.transition_rows[making.blocks] = rows
            keep(transition.flatten(0, 1), self._each_head, layer.transition, layer.transition_scale, rows.flatten())
        self._layers -= 1
        if not self._layers:
            self._made(self._stay)

    def _rows(self, stays: Tensor) -> Tensor:
        """[segments, heads] the slot of each transition of this layer, -1 where it does not stay."""
        order = self._stay[:, None] + stays.cumsum(1)
        rows = self._making.transitions.gather(1, (order - 1).clamp(min=0)).masked_fill(~stays, -1)
        self._stay += stays.sum(1)
        return rows


def keep(made: Tensor, each: Tensor, stored: Tensor, scale: Tensor | None, slots: Tensor) -> None:
    """Round made[each] into `slots` of `stored`, with a `scale` [..., K] of its columns if that has eight bits."""
    from sglang_hybrid_kernels.copy_slots import copy_slots

    scales = [None if scale is None else scale.unsqueeze(-2)]
    copy_slots([made], each, slots, into=[stored], into_scales=scales, slot_dim=0, check_slots=False)
