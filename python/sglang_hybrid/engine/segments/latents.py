"""Attention over latents on a GPU, whose heads are wider than `seam_attention` takes: in PyTorch, some keys at a time.

PyTorch's own would repeat the one key head for every query head: 20 GB of a text of 262,144 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 128
"""Tokens at a time."""
ELEMENTS = 1 << 26
"""Of the scores of these tokens, 256 MiB, and of the keys or values that they are taken with."""


def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    bounds: list[tuple[int, int, int, int]],
    scale: float,
) -> Tensor:
    """Causal attention of rows of tokens at the ends of stretches of a text: [tokens, heads, V].

    query: [tokens, heads, K]; k_cache, v_cache: [slots, 1, K or V]; the row (first, last, begin, end) are tokens
    [first, last), and the last of what lies in slots[begin:end].
    """
    output = query.new_empty(*query.shape[:2], v_cache.shape[-1])
    for first, last, begin, end in bounds:
        for at in range(first, last, ROWS):
            to = min(at + ROWS, last)
            seen = slots[begin : end - (last - to)]
            output[at:to] = _attend(query[at:to].float() * scale, k_cache, v_cache, seen)
    return output


def _attend(query: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    """Of the last tokens of a text in `slots`, by a softmax that goes from keys to keys."""
    rows, heads, size = query.shape
    some = max(1, ELEMENTS // max(rows * heads, size))
    last = torch.arange(len(slots) - rows, len(slots), device=slots.device)[:, None, None]  # what each token sees
    top = query.new_full((rows, heads, 1), -torch.inf)
    total, found = torch.zeros_like(top), query.new_zeros(rows, heads, v_cache.shape[-1])
    for begin in range(0, len(slots), some):
        now = slots[begin : begin + some]
        scores = (query.flatten(0, 1) @ k_cache[now, 0].float().mT).view(rows, heads, -1)
        if begin + len(now) > len(slots) - rows + 1:
            there = torch.arange(begin, begin + len(now), device=slots.device)
            scores.masked_fill_(there > last, -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))  # finite: the first key is seen by all
        kept, weights = (top - higher).exp_(), scores.sub_(higher).exp_()
        total = total * kept + weights.sum(-1, keepdim=True)
        found.mul_(kept).add_((weights.flatten(0, 1) @ v_cache[now, 0].float()).view_as(found))
        top = higher
    return found.div_(total)
