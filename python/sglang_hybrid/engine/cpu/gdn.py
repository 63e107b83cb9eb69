"""Gated delta rule (Yang et al. 2024, arXiv 2412.06464, section 3.3): chunked prefill and one-token decode.

State layout [slots, HV, V, K], as in SGLang's pool on a CPU. A slot below zero is padding: never read, never written.
What forgets by channel instead of by head (`kda.py`) runs through the same chunks and steps.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_hybrid.engine.cpu.slots import advance_rows, read
from sglang_hybrid.engine.cpu.speculation.candidates import follow
from sglang_hybrid.engine.cpu.varlen import CHUNK, ChunkPlan
from sglang_hybrid_kernels.gates import log_decay

_BLOCK_ELEMENTS = 1 << 18
"""Elements of a [chunks, heads, length, length] temporary, and a quarter of the states carried at once: what is
worked on stays in the processor's cache."""

SPAN = 16
"""Tokens between which decays by channel are taken one by one."""

LEAST_DECAY = -80.0
"""e^-80 is nothing next to any state, and exp is slow where float32 underflows."""


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

    q, k: [1, T, HK, K]; v: [1, T, HV, V]; g <= 0, beta: [1, T, HV]; initial_state: [slots, HV, V, K], one slot per
    sequence given by initial_state_indices (default: 0, 1, ...). Returns the output [1, T, HV, V] in v's dtype, None,
    and the state at the start of every chunk [1, chunks, HV, V, K] in float32, sequence by sequence. Final states are
    written to initial_state. With G the running sum of g inside a chunk, the written values U solve
    (I + A) U = beta (V - e^G K S^T), A[i, j] = beta_i e^(G_i - G_j) k_i k_j for j < i.
    """
    if head_first:
        raise NotImplementedError("chunk_gated_delta_rule takes tokens first: head_first=True")
    output, h = chunked(
        q, k, v, g.unsqueeze(-1), beta, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, initial_state_indices, scale
    )
    return output, None, h


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    l2norm: bool,
    initial_state_indices: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor | None]:
    """The same with decay by head, g [1, T, HV, 1], or by channel, [1, T, HV, K]; returns output and start states."""
    bounds = cu_seqlens.tolist()
    slots = list(range(len(bounds) - 1)) if initial_state_indices is None else initial_state_indices.tolist()
    q, k, v, g, beta = (x[0] for x in (q, k, v, g, beta))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    together = max(1, 4 * _BLOCK_ELEMENTS // initial_state[0].numel())
    output, starts = torch.zeros_like(v), []
    for first in range(0, len(slots), together):
        some = bounds[first : first + together + 1]
        plan = ChunkPlan.of([bound - some[0] for bound in some], CHUNK)
        if plan.chunks:
            now = slice(some[0], some[-1])
            inputs = (q[now], k[now], v[now], g[now], beta[now])
            starts.append(_prefill(plan, inputs, output[now], initial_state, slots[first:], l2norm, scale))
    h = starts[0] if len(starts) == 1 else torch.cat(starts) if starts else None
    return output.unsqueeze(0), None if h is None else h.unsqueeze(0)


def _prefill(
    plan: ChunkPlan,
    inputs: tuple[Tensor, ...],
    output: Tensor,
    pool: Tensor,
    slots: list[int],
    l2norm: bool,
    scale: float,
) -> Tensor:
    """Some packed sequences: writes output [T, HV, V] and the pool; returns the chunks' start states in their order."""
    slots = [slots[i] for i in plan.order]
    state = read(pool, slots)
    outputs, starts = [], []
    products = plan.length * max(plan.length, SPAN * inputs[3].shape[-1])
    for first, last, widths in plan.blocks(_BLOCK_ELEMENTS // (output.shape[1] * products)):
        q, k, v, g, beta = (plan.padded(x, first, last) for x in inputs)
        q, k = _normalised(q, k, l2norm, scale)
        out, states, state, ended = _block(q, k, v, g, beta, state, widths)
        outputs.append(out)
        starts.append(states)
        for rank, final in ended:
            if slots[rank] >= 0:
                pool[slots[rank]] = final
    output.copy_(plan.packed(torch.cat(outputs) if len(outputs) > 1 else outputs[0]))
    h = torch.cat(starts) if len(starts) > 1 else starts[0]
    return h if plan.is_in_sequence_order else h.index_select(0, plan.in_sequence_order)


def _normalised(q: Tensor, k: Tensor, l2norm: bool, scale: float) -> tuple[Tensor, Tensor]:
    """float32 q, k [..., K] with unit length if l2norm, q also scaled."""
    if not l2norm:
        return q * scale, k
    q_norm, k_norm = (x.square().sum(-1, keepdim=True).add_(1e-6).rsqrt_() for x in (q, k))
    return q * q_norm.mul_(scale), k * k_norm


def _block(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, widths: list[int]
) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, Tensor]]]:
    """Run some waves: inputs [chunks, length, heads, ...], the decay's last dimension 1 or K.

    `widths` has one more entry, the wave after the last.
    Returns the output [chunks, length, HV, V], the chunks' start states [chunks, HV, V, K], the states to go on with,
    and (rank, final state) of the sequences that ended.
    """
    n, length, hk, dk = k.shape
    hv, dv = v.shape[2:]
    rep = hv // hk
    q, k = (x.transpose(1, 2).contiguous().view(n, hk, 1, length, dk) for x in (q, k))
    v = v.transpose(1, 2).reshape(n, hk, rep, length, dv)
    total = g.transpose(1, 2).cumsum(2).view(n, hk, rep, length, g.shape[-1])
    beta = beta.transpose(1, 2).reshape(n, hk, rep, length, 1)
    grown = total.exp()
    among_keys, of_queries = chunk_products(q, k, total)
    a = among_keys.mul_(beta)
    if dv + dk <= 2 * length:  # few columns: solve for them; else invert and multiply
        rhs = torch.cat([beta * v, (beta * grown) * k], -1)
        solved = torch.linalg.solve_triangular(a, rhs, upper=False, unitriangular=True).flatten(0, 2)
        written, reads = solved[..., :dv], solved[..., dv:]
    else:
        identity = torch.eye(length).expand_as(a)
        inverse = torch.linalg.solve_triangular(a, identity, upper=False, unitriangular=True) * beta.mT
        written = (inverse @ v).flatten(0, 2)
        reads = (inverse @ (grown * k)).flatten(0, 2)
    fading = ((total[..., -1:, :] - total).exp_() * k).flatten(0, 2)
    kept = grown[..., -1:, :].reshape(n, hv, 1, g.shape[-1])
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
    out.baddbmm_(of_queries.tril_().flatten(0, 2), written)
    return out.view(n, hv, length, dv).transpose(1, 2), states, state, ended


def chunk_products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """sum_c k_ic k_jc e^(total_i - total_j)_c for j <= i, and the same of q and k; what is above is of no meaning.

    By channel, no exponent may be split in two: e^-total overflows. Between spans of tokens it is split at the first
    token of the later one, where both parts are below 1; inside a span it is taken whole.
    """
    if total.shape[-1] == 1:
        decay = (total - total.mT).clamp_(LEAST_DECAY, 0.0).exp_()  # 1 above the diagonal: masked
        return k @ k.mT * decay, q @ k.mT * decay
    length = total.shape[-2]
    among, of = (total.new_zeros(*total.shape[:-1], length) for _ in range(2))
    for begin in range(0, length, SPAN):
        now = slice(begin, min(begin + SPAN, length))
        here, before = total[..., now, :], total[..., :begin, :]
        inside = (here.unsqueeze(-2) - here.unsqueeze(-3)).clamp_(LEAST_DECAY, 0.0).exp_()
        inside.mul_(k[..., now, :].unsqueeze(-3))
        since = (here - here[..., :1, :]).exp_()
        until = (here[..., :1, :] - before).exp_().mul_(k[..., :begin, :]).mT
        for rows, into in ((k, among), (q, of)):
            into[..., now, now] = (inside @ rows[..., now, :, None]).squeeze(-1)
            if begin:
                into[..., now, :begin] = (since * rows[..., now, :]) @ until
    return among, of


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
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int = 0,
    retrieve_parent_token: Tensor | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """One token for each of R rows: q, k [1, R, HK, K]; v [1, R, HV, V]; a, b [R, HV]; returns [1, R, HV, V].

    With `is_kda` a is [R, HV * K], `lower_bound` that of `log_decay`.

    The states [slots, HV, V, K] of the rows' slots are updated in place; a row with a negative slot reads zeros and
    writes nothing. With `disable_state_update` the rows are `cache_steps` candidates of each slot, the pool stays as it
    is, and what candidates leave goes to rows of the buffer [rows, cache_steps, HV, V, K].
    """
    if (softplus_beta, softplus_threshold) != (1.0, 20.0):
        raise NotImplementedError(f"the CPU platform has one softplus: beta={softplus_beta}, {softplus_threshold}")
    rows, hv, _ = v.shape[1:]
    rep = hv // k.shape[2]
    if is_kda:
        g = log_decay(a.reshape(rows, hv, -1), A_log, dt_bias, lower_bound)
        beta = b.reshape(rows, hv).float().sigmoid()
    else:
        g, beta = gating(A_log, a.reshape(rows, hv), b.reshape(rows, hv), dt_bias)
    q, k = _normalised(q[0].float(), k[0].float(), use_qk_l2norm_in_kernel, k.shape[-1] ** -0.5)
    if rep > 1:
        q, k = q.repeat_interleave(rep, 1), k.repeat_interleave(rep, 1)
    slots, pool = initial_state_indices.tolist(), initial_state_source
    inputs = (q, k, v[0].float(), g.exp_().view(rows, hv, -1), beta.view(rows, hv, 1))
    if disable_state_update:
        if intermediate_states_buffer is None or intermediate_state_indices is None:
            raise NotImplementedError("on a CPU candidates leave their states in a buffer, and there is none")
        requests = rows // cache_steps
        inputs = tuple(x.view(requests, cache_steps, *x.shape[1:]) for x in inputs)

        outputs, left = follow(
            read(pool, slots[:requests]),
            retrieve_parent_token,
            cache_steps,
            lambda node, state: _step(state, *(x[:, node] for x in inputs)),
            pool.dtype,
        )
        intermediate_states_buffer[intermediate_state_indices[:requests].long(), :cache_steps] = left
        return torch.stack(outputs, 1).flatten(0, 1).unsqueeze(0).to(v.dtype)
    return advance_rows(pool, slots, _step, inputs).unsqueeze(0).to(v.dtype)


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, beta: Tensor) -> Tensor:
    """Advance states [R, HV, V, K] in place by one token each; returns [R, HV, V].

    q, k [R, HV, K]; v [R, HV, V]; kept [R, HV, 1 or K]; beta [R, HV, 1].
    """
    seen = torch.matmul(state, (torch.stack([k, q], -1).mul_(kept.unsqueeze(-1))))  # what k and q find there, decayed
    value = (v - seen[..., 0]).mul_(beta)
    output = torch.addcmul(seen[..., 1], value, (k * q).sum(-1, keepdim=True))
    state.mul_(kept.unsqueeze(-2)).addcmul_(value.unsqueeze(-1), k.unsqueeze(-2))
    return output
