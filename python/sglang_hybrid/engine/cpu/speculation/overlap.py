"""The event loop that overlaps scheduling with forward passes, which GPUs have by default.

A round of drafts then begins before the scheduler knows what the last one brought; it is handed over in buffers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def stay_as_asked(server_args: Any) -> None:
    """REPLACE hook of _disable_overlap_schedule_for_cpu, which turns the loop off where something speculates.

    It is off on a CPU unless `--hybrid-cpu-event-loop overlap` asks for it, to try what a GPU does.
    """


def without_streams(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """BEFORE hook of FutureMap._resolve_spec_extras, which asks a CPU tensor for its stream up to 0.5.22."""
    indices = getattr((kwargs.get("batch") or args[1]).spec_info, "future_indices", None)
    if indices is not None:
        indices.record_stream = _unnoted
    return args, kwargs


def _unnoted(stream: Any) -> None:
    """There is but one."""


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
