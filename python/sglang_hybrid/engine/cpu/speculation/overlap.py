"""The event loop that overlaps scheduling with forward passes, which GPUs have by default.

A round of drafts then begins before the scheduler knows what the last one brought; it is handed over in buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Unstreamed(Tensor):
    """A tensor of which nobody notes which stream uses it: on a CPU there are none, and PyTorch refuses to."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def record_stream(self, stream: Any) -> None:
        pass


def stay_as_asked(server_args: Any) -> None:
    """REPLACE hook of _disable_overlap_schedule_for_cpu, which turns the loop off where something speculates.

    It is off on a CPU unless `--hybrid-cpu-event-loop overlap` asks for it, to try what a GPU does.
    """


def without_streams(original: Any, futures: Any, batch: Any) -> Any:
    """AROUND hook of FutureMap._resolve_spec_extras, which asks a CPU tensor for its stream up to 0.5.22."""
    drafts = batch.spec_info
    indices = getattr(drafts, "future_indices", None)
    if indices is None:
        return original(futures, batch)
    drafts.future_indices = indices.as_subclass(_Unstreamed)
    try:
        return original(futures, batch)
    finally:
        drafts.future_indices = indices


def gather_spec_extras(
    indices: Tensor,
    topk_p_buf: Tensor,
    topk_index_buf: Tensor,
    output_tokens_buf: Tensor,
    hidden_states_buf: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Rows `indices` of each buffer [rows, ...]; a Triton kernel elsewhere."""
    rows = indices.long()
    hidden_states = None if hidden_states_buf is None else hidden_states_buf[rows]
    return topk_p_buf[rows], topk_index_buf[rows], output_tokens_buf[rows], hidden_states
