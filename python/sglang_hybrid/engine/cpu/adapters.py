"""Adapters of the output head (`lm_head`) in PyTorch: the head sees other rows than the layers before it.

Of a prefill it gets the rows whose logits are wanted, mostly the last of each request. SGLang's PyTorch backend counts
whole prompts there, so where requests of several adapters share a prefill the first token of one is said by the head of
another, or by none. SGLang's other backends say what the head sees (`pruned_batch_info`); so does this one here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch


def note_head_rows(
    _: Any, backend: Any, forward_batch: Any, weight_indices: Sequence[int], *args: Any, **kwargs: Any
) -> None:
    """AFTER hook of TorchNativeLoRABackend.prepare_lora_batch: say how many rows of each request the head gets.

    weight_indices: the adapter of each request, by its place in the pool.
    """
    from sglang.srt.lora.utils import get_lm_head_pruned_lens

    backend.lm_head_batch_info = backend.lm_head_pass_batch_infos = None
    rows = get_lm_head_pruned_lens(forward_batch)
    if rows is None:  # the head gets what the layers got
        return
    backend.lm_head_batch_info = _routing(backend.batch_info, weight_indices, rows)
    passes = backend._get_lm_head_pass_segments(weight_indices, rows)
    if passes is not None:  # log-probabilities of a long prompt, a part at a time
        backend.lm_head_pass_batch_infos = [_routing(backend.batch_info, *each) for each in passes]


def by_head_rows(
    original: Callable[..., Any], backend: Any, *args: Any, pruned_batch_info: Any = None, **kwargs: Any
) -> Any:
    """AROUND hook of TorchNativeLoRABackend.run_lora_a_sgemm and run_lora_b_sgemm, which take no notice of it."""
    if pruned_batch_info is None:
        return original(backend, *args, **kwargs)
    whole, backend.batch_info = backend.batch_info, pruned_batch_info
    try:
        return original(backend, *args, **kwargs)
    finally:
        backend.batch_info = whole


def _routing(batch_info: Any, adapters: Sequence[int], rows: Sequence[int]) -> Any:
    """`batch_info` for an input in which request i has rows[i] rows."""
    lens, which = (torch.tensor(list(each), dtype=torch.int32) for each in (rows, adapters))
    starts = torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=torch.int32)])
    return dataclasses.replace(
        batch_info,
        use_cuda_graph=False,
        bs=len(lens),
        num_segments=len(lens),
        max_len=max(rows),
        seg_lens=lens,
        seg_lens_cpu=lens,
        seg_indptr=starts,
        seg_indptr_cpu=starts,
        weight_indices=which,
        weight_indices_cpu=which,
        expected_tokens=sum(rows),
    )
