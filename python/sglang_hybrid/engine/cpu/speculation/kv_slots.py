"""KV slots of candidates: which they are, and the move of the accepted ones to where the sequence goes on."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def assign_extend_cache_locs(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out: Tensor, pool_len: int
) -> None:
    """Pack the slots in columns start to end of each request's row of req_to_token [rows, pool_len] into out."""
    at = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out[at : at + last - first] = req_to_token[row, first:last]
        at += last - first


def assign_draft_cache_locs_contiguous(
    req_pool_indices: Tensor, req_to_token: Tensor, seq_lens: Tensor, out: Tensor, pool_len: int, topk: int, steps: int
) -> None:
    """Pack the topk * steps slots behind each committed length into out: those that a draft model writes."""
    assign_extend_cache_locs(req_pool_indices, req_to_token, seq_lens, seq_lens + topk * steps, out, pool_len)


def fill_accept_out_cache_loc(accept_index: Tensor, out_cache_loc: Tensor, out: Tensor) -> None:
    """Pack the slots of the accepted nodes into out; accept_index [requests, depth] has -1 where none was accepted."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    out[: accepted.numel()] = out_cache_loc[accepted]


def fill_bonus_tokens(accept_tokens: Tensor, accept_lens: Tensor, out: Tensor, stride: int) -> None:
    """The last accepted token of each request into out [requests]; accept_tokens has `stride` places for each."""
    last = torch.arange(accept_lens.numel()) * stride + accept_lens.long() - 1
    out.copy_(accept_tokens.flatten()[last])


def copy_all_layer_kv_cache(addresses: Tensor, row_bytes: Tensor, target: Tensor, source: Tensor) -> None:
    """Copy rows `source` to rows `target` in every buffer, given by its address and its bytes per row.

    Both may name the same rows: all are read before the first is written.
    """
    moves = [(to, at) for to, at in zip(target.tolist(), source.tolist(), strict=True) if to != at]
    if not moves:
        return
    for base, size in zip(addresses.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(base + at * size, size) for _, at in moves]
        for (to, _), row in zip(moves, rows, strict=True):
            ctypes.memmove(base + to * size, row, size)
