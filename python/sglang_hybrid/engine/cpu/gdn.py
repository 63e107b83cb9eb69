"""Gated delta rule (Yang et al. 2024, arXiv 2412.06464, section 3.3): chunked prefill and one-token decode.

State layout [slots, HV, V, K], as in SGLang's pool on a CPU. A slot below zero is padding: never read, never written.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_hybrid.engine.cpu.varlen import CHUNK, ChunkPlan

_BLOCK_ELEMENTS = 1 << 21
"""Elements of the largest temporary that is computed at once: keeps long prompts inside the cache and bounds memory."""


def gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay g = -exp(A_log) softplus(a + dt_bias) and write strength beta = sigmoid(b); both [1, T, HV] float32."""
    g = F.softplus(a.float() + dt_bias.float()).mul_(A_log.float().exp().neg_())
    return g.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    initial_state_indices: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, None, Tensor | None]:
    """Gated delta rule over packed sequences, exact, in matrix products over chunks of 64 tokens.

    q, k: [1, T, HK, K]; v: [1, T, HV, V]; g, beta: [1, T, HV]; initial_state: [slots, HV, V, K], one slot per sequence
    given by initial_state_indices (default: 0, 1, ...). Returns the output [1, T, HV, V] in v's dtype, None, and the
    state at the start of every chunk [1, chunks, HV, V, K] in float32, sequence by sequence. Final states are written
    to initial_state. With G the running sum of g inside a chunk, the written values U solve
    (I + A) U = beta (V - e^G K S^T), A[i, j] = beta_i e^(G_i - G_j) k_i k_j for j < i.
    """
    if head_first:
        raise NotImplementedError("chunk_gated_delta_rule takes tokens first: head_first=True")
    plan = ChunkPlan.of(cu_seqlens.tolist(), CHUNK)
    if plan.chunks == 0:
        return torch.zeros_like(v), None, None
    q, k = _normalised(q[0], k[0], use_qk_l2norm_in_kernel, scale)
    slots = list(range(len(plan.counts))) if initial_state_indices is None else initial_state_indices.tolist()
    slots = [slots[i] for i in plan.order]
    state = _read(initial_state, slots)
    output = v.new_empty((plan.chunks, plan.length, *v.shape[2:]), dtype=torch.float32)
    inputs = [plan.scatter(x) for x in (q, k, v[0], g[0], beta[0])]
    starts, finals = [], [None] * len(slots)
    for first, last in _blocks(plan, v.shape[2]):
        rows = slice(plan.offsets[first], plan.offsets[last])
        widths = [*plan.widths[first:last], plan.widths[last] if last < len(plan.widths) else 0]
        output[rows], block_starts, state, ended = _block(*(x[rows] for x in inputs), state, widths)
        starts.append(block_starts)
        for rank, final in ended:
            finals[rank] = final
    h = torch.cat(starts)
    if len(slots) > 1:
        h = h.index_select(0, plan.in_sequence_order)
    _write(initial_state, slots, torch.stack(finals))
    return plan.gather(output).unsqueeze(0).to(v.dtype), None, h.unsqueeze(0)


def _normalised(q: Tensor, k: Tensor, l2norm: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = q.float(), k.float()
    if l2norm:
        q = q * (q.square().sum(-1, keepdim=True).add_(1e-6).rsqrt_().mul_(scale))
        k = k * k.square().sum(-1, keepdim=True).add_(1e-6).rsqrt_()
        return q, k
    return q * scale, k


def _blocks(plan: ChunkPlan, heads: int) -> list[tuple[int, int]]:
    """Ranges of waves whose [chunks, heads, length, length] temporaries stay below _BLOCK_ELEMENTS."""
    budget = max(1, _BLOCK_ELEMENTS // (heads * plan.length * plan.length))
    blocks, first = [], 0
    for wave in range(1, len(plan.widths) + 1):
        if wave == len(plan.widths) or plan.offsets[wave + 1] - plan.offsets[first] > budget:
            blocks.append((first, wave))
            first = wave
    return blocks


def _block(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, widths: list[int]
) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, Tensor]]]:
    """Run some waves: inputs [chunks, length, heads, ...]; `widths` has one more entry, the wave after the last.

    Returns the output [chunks, length, HV, V], the chunks' start states [chunks, HV, V, K], the states to go on with,
    and (rank, final state) of the sequences that ended.
    """
    n, length, hk, dk = k.shape
    hv, dv = v.shape[2:]
    rep = hv // hk
    q, k = (x.transpose(1, 2).contiguous().view(n, hk, 1, length, dk) for x in (q, k))
    v = v.transpose(1, 2).reshape(n, hk, rep, length, dv)
    total = g.transpose(1, 2).cumsum(-1).view(n, hk, rep, length, 1)
    beta = beta.transpose(1, 2).reshape(n, hk, rep, length, 1)
    future = torch.ones(length, length, dtype=torch.bool).triu_(1)
    decay = (total - total.mT).masked_fill_(future, -torch.inf).exp_()
    grown = total.exp()
    a = (k @ k.mT * decay).mul_(beta)
    rhs = torch.cat([beta * v, (beta * grown) * k], -1)
    solved = torch.linalg.solve_triangular(a, rhs, upper=False, unitriangular=True).flatten(0, 2)
    written, reads = solved[..., :dv], solved[..., dv:]
    fading = ((total[..., -1:, :] - total).exp_() * k).flatten(0, 2)
    kept = grown[..., -1:, :].reshape(n, hv, 1, 1)
    starts, ended, at = [], [], 0
    for width, following in pairwise(widths):
        heads = slice(at * hv, (at + width) * hv)
        flat = state.flatten(0, 1)
        values = written[heads].baddbmm_(reads[heads], flat.mT, alpha=-1)
        after = torch.bmm(values.mT, fading[heads]).view_as(state).addcmul_(state, kept[at : at + width])
        starts.append(state)
        ended += [(rank, after[rank]) for rank in range(following, width)]
        state, at = after[:following], at + width
    states = torch.cat(starts)
    out = torch.bmm((q * grown).flatten(0, 2), states.flatten(0, 1).mT)
    out.baddbmm_((q @ k.mT * decay).flatten(0, 2), written)
    return out.view(n, hv, length, dv).transpose(1, 2), states, state, ended


def _read(pool: Tensor, slots: list[int]) -> Tensor:
    """Float32 states [len(slots), ...] of a pool; zero for padding slots."""
    if len(slots) == 1 and slots[0] >= 0:
        return pool[slots[0]].unsqueeze(0).float()
    index = torch.tensor(slots)
    states = pool.index_select(0, index.clamp(min=0)).float()
    return states.masked_fill_((index < 0).view(-1, 1, 1, 1), 0.0) if min(slots) < 0 else states


def _write(pool: Tensor, slots: list[int], states: Tensor) -> None:
    """Store states [len(slots), ...] in their slots, skipping padding."""
    if min(slots) >= 0:
        pool[slots] = states.to(pool.dtype)
        return
    rows = [row for row, slot in enumerate(slots) if slot >= 0]
    pool[[slots[row] for row in rows]] = states[rows].to(pool.dtype)


def recurrent_gated_delta_rule(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    is_kda: bool = False,
) -> Tensor:
    """One token for each of R rows: q, k [1, R, HK, K]; v [1, R, HV, V]; a, b [R, HV]; returns [1, R, HV, V].

    The states [slots, HV, V, K] of the rows' slots are updated in place; a row with a negative slot reads zeros and
    writes nothing.
    """
    if is_kda or (softplus_beta, softplus_threshold) != (1.0, 20.0):
        raise NotImplementedError(f"the CPU platform decodes GDN only: is_kda={is_kda}, beta={softplus_beta}")
    rows, hv, _ = v.shape[1:]
    rep = hv // k.shape[2]
    g, beta = gating(A_log, a.reshape(rows, hv), b.reshape(rows, hv), dt_bias)
    q, k = _normalised(q[0], k[0], use_qk_l2norm_in_kernel, None)
    if rep > 1:
        q, k = q.repeat_interleave(rep, 1), k.repeat_interleave(rep, 1)
    slots = initial_state_indices.tolist()
    in_place = rows == 1 and slots[0] >= 0 and initial_state_source.dtype == torch.float32
    state = initial_state_source[slots[0]].unsqueeze(0) if in_place else _read(initial_state_source, slots)
    kept = g.exp_().view(rows, hv, 1)
    seen = torch.matmul(state, torch.stack([k, q], -1)).mul_(kept.unsqueeze(-1))  # what k and q find there, decayed
    value = (v[0].float() - seen[..., 0]).mul_(beta.view(rows, hv, 1))
    output = torch.addcmul(seen[..., 1], value, (k * q).sum(-1, keepdim=True))
    state.mul_(kept.unsqueeze(-1)).addcmul_(value.unsqueeze(-1), k.unsqueeze(-2))
    if not in_place:
        _write(initial_state_source, slots, state)
    return output.unsqueeze(0).to(v.dtype)
