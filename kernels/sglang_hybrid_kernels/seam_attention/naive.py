"""The specification of seam_attention."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_hybrid_kernels.seam_attention.check import Plan


def seam_attention(plan: Plan) -> Tensor:
    """See sglang_hybrid_kernels.seam_attention; computes in fp32, or in fp64 if q is."""
    q, wide = plan.q, torch.promote_types(plan.q.dtype, torch.float32)
    out = q.new_zeros(q.shape[0], q.shape[1], plan.v.shape[2])
    groups = q.shape[1] // plan.k.shape[1]
    pages, queries = plan.page_offsets.tolist(), plan.query_offsets.tolist()
    for request in range(len(pages) - 1):
        rows = slice(queries[request], queries[request + 1])
        page = plan.pages[pages[request] : pages[request + 1]].long()
        within = torch.arange(plan.page_size, device=page.device)
        slots = (page[:, None] * plan.page_size + within).flatten()
        k, v = (x[slots].to(wide).repeat_interleave(groups, 1) for x in (plan.k, plan.v))
        position, key = plan.positions[rows, None], torch.arange(slots.numel(), device=slots.device)
        seen = key <= position
        if plan.window is not None:
            seen &= key > position - plan.window
        scores = torch.einsum("qhd,khd->hqk", q[rows].to(wide), k) * plan.factor
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        weights = weights.masked_fill(~seen, 0.0)  # a row that sees nothing is NaN until here
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out
