"""Triton kernels of chunk_transition.

`solve_kernel` works on all chunks at once: W and U of the delta rule, with which a chunk writes the values U - W S^T.
`advance_kernel` holds some rows of one head's [S | T^T] in registers and takes them through the segment's chunks; rows
of T^T are rows of a state that starts at the identity and is given no values. `flag_kernel` says which T vanish.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_hybrid_kernels.arguments import require_grid
from sglang_hybrid_kernels.chunk import CHUNK, NORM_EPSILON
from sglang_hybrid_kernels.chunk_transition.check import Plan

ROWS = 32
"""Rows of [S | T^T] per program."""

INDICES = ["cu_seqlens", "entries", "initial_slots"]
"""Arguments whose alignment makes no other kernel: nothing is compiled in the middle of serving."""

BLOCK = tl.constexpr(16)
"""Tokens of the diagonal blocks that are solved by substitution."""


@triton.jit
def _locate(cu_seqlens, number, segments, CHUNK: tl.constexpr):
    """First token and length of chunk `number`, counted over all segments; length 0 if there are fewer chunks."""
    segment, begin, before = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for first in range(0, segments, 64):
        some = first + tl.arange(0, 64)
        lo = tl.load(cu_seqlens + some, mask=some < segments, other=0).to(tl.int64)
        hi = tl.load(cu_seqlens + some + 1, mask=some < segments, other=0).to(tl.int64)
        chunks = (hi - lo + CHUNK - 1) // CHUNK
        ends = before + tl.cumsum(chunks, 0)
        passed = (ends <= number) & (some < segments)
        segment += tl.sum(passed.to(tl.int64))
        begin = tl.maximum(begin, tl.max(tl.where(passed, ends, 0)))
        before += tl.sum(chunks)
    exists = segment < segments
    lo = tl.load(cu_seqlens + segment, mask=exists, other=0).to(tl.int64)
    hi = tl.load(cu_seqlens + segment + 1, mask=exists, other=0).to(tl.int64)
    first = lo + (number - begin) * CHUNK
    return first, tl.where(exists, tl.minimum(hi - first, CHUNK), 0).to(tl.int32)


@triton.jit
def _load_keys(k, tokens, inside, k_token, o_k, in_k, epsilon, L2NORM: tl.constexpr):
    """[C, COLUMNS] float32, zero outside."""
    key = tl.load(k + tokens[:, None] * k_token + o_k[None, :], mask=inside[:, None] & in_k[None, :], other=0.0).to(
        tl.float32
    )
    if L2NORM:
        key *= tl.rsqrt(tl.sum(key * key, 1) + epsilon)[:, None]
    return key


@triton.jit
def _dot(a, b, like, HALF: tl.constexpr):
    """Matrix product accumulated in float32; operands in the 16-bit type of `like` if HALF, else in float32."""
    if HALF:
        product = tl.dot(a.to(like.dtype.element_ty), b.to(like.dtype.element_ty))
    else:
        product = tl.dot(a, b, input_precision="tf32x3")
    return product


@triton.jit
def _interaction_by_channel(key, total, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """[C, C] with sum_c exp(total_ic - total_jc) k_ic k_jc below the diagonal, for key and total [C, COLUMNS].

    Between blocks of 16 tokens the decay is split at the later block's first token, where neither factor can overflow;
    inside the blocks it is taken as it is, for one key of every block at a time.
    """
    o_t = tl.arange(0, CHUNK)
    result = tl.zeros([CHUNK, CHUNK], tl.float32)
    for block in tl.static_range(1, CHUNK // BLOCK):
        at = tl.sum(tl.where((o_t == block * BLOCK)[:, None], total, 0.0), 0)[None, :]
        later = (o_t >= block * BLOCK) & (o_t < (block + 1) * BLOCK)
        late = tl.where(later[:, None], key * tl.exp(tl.minimum(total - at, 0.0)), 0.0)
        early = tl.where((o_t < block * BLOCK)[:, None], key * tl.exp(tl.minimum(at - total, 0.0)), 0.0)
        result += tl.dot(late, tl.trans(early), input_precision=PRECISION)
    keys = tl.reshape(key, [CHUNK // BLOCK, BLOCK, COLUMNS])
    totals = tl.reshape(total, [CHUNK // BLOCK, BLOCK, COLUMNS])
    o_b = tl.arange(0, BLOCK)[None, :, None]
    own = (o_t // BLOCK)[:, None] == (o_t // BLOCK)[None, :]
    for i in range(BLOCK):
        one = tl.sum(tl.where(o_b == i, keys, 0.0), 1)[:, None, :]
        since = tl.minimum(totals - tl.sum(tl.where(o_b == i, totals, 0.0), 1)[:, None, :], 0.0)
        column = tl.reshape(tl.sum(keys * one * tl.exp(since), 2), [CHUNK])
        result += tl.where(own & (o_t % BLOCK == i)[None, :], column[:, None], 0.0)
    return result


@triton.jit
def _inverse(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 for a strictly lower triangular: substitution inside blocks of 16, all at once, then their products.

    With D the inverse of the block diagonal and N the rest, (I + D N)^-1 = (I - M)(I + M M), M = D N, as M^4 = 0.
    """
    o_t = tl.arange(0, CHUNK)
    own = (o_t // BLOCK)[:, None] == (o_t // BLOCK)[None, :]
    identity = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0)
    inside = tl.where(own, -a, 0.0)
    for i in range(1, BLOCK):
        chosen = (o_t % BLOCK == i)[:, None]
        row = tl.sum(tl.where(chosen, inside, 0.0), 0)
        row += tl.sum(row[:, None] * inside, 0)
        inside = tl.where(chosen & own, row[None, :], inside)
    inside += identity
    m = tl.dot(inside, tl.where(own, 0.0, a), input_precision=PRECISION)
    series = tl.dot(identity - m, identity + tl.dot(m, m, input_precision=PRECISION), input_precision=PRECISION)
    return tl.dot(series, inside, input_precision=PRECISION)


@triton.jit(do_not_specialize=["segments"], do_not_specialize_on_alignment=["cu_seqlens"])
def solve_kernel(
    k, v, g, beta, w, u, cu_seqlens, segments,
    k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head, epsilon, heads,
    V, K, GROUP: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, VALUES: tl.constexpr,
    DIAGONAL: tl.constexpr, HAS_BETA: tl.constexpr, L2NORM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """grid [chunks or more, heads]. W = (I + A)^-1 beta e^total k, U = (I + A)^-1 beta v, both [T, heads, .] dense."""
    head = tl.program_id(1).to(tl.int64)
    first, count = _locate(cu_seqlens, tl.program_id(0), segments, CHUNK)
    if count > 0:
        PRECISION: tl.constexpr = "tf32" if HALF else "tf32x3"
        o_t, o_k = tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
        tokens, inside, in_k = first + o_t, o_t < count, o_k < K
        key = _load_keys(k + (head // GROUP) * k_head, tokens, inside, k_token, o_k, in_k, epsilon, L2NORM)
        strength = tl.where(inside, 1.0, 0.0)
        if HAS_BETA:
            strength = tl.load(beta + tokens * beta_token + head * beta_head, mask=inside, other=0.0).to(tl.float32)
        if DIAGONAL:
            total = tl.cumsum(_load_decay(g + head * g_head, tokens, inside, g_token, o_k, in_k), 0)
            a = _interaction_by_channel(key, total, CHUNK, COLUMNS, PRECISION)
            grown = key * tl.exp(total)
        else:
            log_decay = tl.load(g + tokens * g_token + head * g_head, mask=inside, other=0.0).to(tl.float32)
            total = tl.cumsum(log_decay, 0)
            a = _dot(key, tl.trans(key), w, HALF) * tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
            grown = key * tl.exp(total)[:, None]
        inverse = _inverse(tl.where(o_t[:, None] > o_t[None, :], a * strength[:, None], 0.0), CHUNK, PRECISION)
        reads = _dot(inverse, grown * strength[:, None], w, HALF)
        p_w = w + (tokens[:, None] * heads + head) * K + o_k[None, :]
        tl.store(p_w, reads.to(w.dtype.element_ty), mask=inside[:, None] & in_k[None, :])
        for begin in range(0, V, VALUES):
            o_v = begin + tl.arange(0, VALUES)
            here = inside[:, None] & (o_v < V)[None, :]
            value = tl.load(v + tokens[:, None] * v_token + head * v_head + o_v[None, :], mask=here, other=0.0)
            solved = _dot(inverse, value.to(tl.float32) * strength[:, None], u, HALF)
            p_u = u + (tokens[:, None] * heads + head) * V + o_v[None, :]
            tl.store(p_u, solved.to(u.dtype.element_ty), mask=here)


@triton.jit
def _load_decay(g, tokens, inside, g_token, o_k, in_k):
    mask = inside[:, None] & in_k[None, :]
    return tl.load(g + tokens[:, None] * g_token + o_k[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _decayed(state, key, value, g, tokens, inside, g_token, o_k, in_k, DIAGONAL: tl.constexpr):
    """State, and what is about to be added to it, as they stand after the chunk's decay; and that decay's logarithm."""
    if DIAGONAL:
        log_decay = _load_decay(g, tokens, inside, g_token, o_k, in_k)
        whole = tl.sum(log_decay, 0)
        key *= tl.exp(whole[None, :] - tl.cumsum(log_decay, 0))
        state *= tl.exp(whole)[None, :]
    else:
        log_decay = tl.load(g + tokens * g_token, mask=inside, other=0.0).to(tl.float32)
        whole = tl.sum(log_decay, 0)
        value *= tl.exp(whole - tl.cumsum(log_decay, 0))[:, None]
        state *= tl.exp(whole)
    return state, key, value, whole


@triton.jit
def _store_decay(p_t, kept, o_k, in_k, once, DIAGONAL: tl.constexpr):
    """A transition of a rule without reads: one number per channel, or the same number everywhere in `kept`."""
    if DIAGONAL:
        tl.store(p_t + o_k, kept.to(p_t.dtype.element_ty), mask=in_k & once)
    else:
        tl.store(p_t, tl.max(kept, 0).to(p_t.dtype.element_ty), mask=once)


@triton.jit(do_not_specialize=["entry_count", "initial_count"], do_not_specialize_on_alignment=INDICES)
def advance_kernel(
    k, v, g, beta, w, cu_seqlens, entries, end_state, transition, vanishing, largest, initial, initial_slots,
    entry_count, initial_count, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head,
    state_entry, state_head, state_row, t_entry, t_head, t_row, flag_entry, flag_head,
    initial_slot, initial_head, initial_row, epsilon, vanishing_below, heads,
    V, K, GROUP: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    DELTA: tl.constexpr, DIAGONAL: tl.constexpr, HAS_BETA: tl.constexpr, L2NORM: tl.constexpr, HALF: tl.constexpr,
    HAS_T: tl.constexpr, HAS_FLAGS: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """grid [blocks of V, then of T's K rows if DELTA and HAS_T; heads; segments]. With DELTA, v is U and w is W."""
    block, head, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    entry = tl.load(entries + segment).to(tl.int64)
    if (entry >= 0) & (entry < entry_count):
        is_t = block >= tl.cdiv(V, ROWS)
        o_r = (block - tl.where(is_t, tl.cdiv(V, ROWS), 0)) * ROWS + tl.arange(0, ROWS)
        o_t, o_k = tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
        in_k, in_v = o_k < K, (o_r < V) & (is_t == 0)
        state = tl.where((is_t & (o_r[:, None] == o_k[None, :])) & in_k[None, :], 1.0, 0.0)
        if HAS_INITIAL:
            slot = tl.load(initial_slots + segment).to(tl.int64)
            started = (slot >= 0) & (slot < initial_count)
            p_initial = initial + slot * initial_slot + head * initial_head + o_r[:, None] * initial_row + o_k[None, :]
            state += tl.load(p_initial, mask=in_v[:, None] & in_k[None, :] & started, other=0.0).to(tl.float32)
        lo, hi = tl.load(cu_seqlens + segment).to(tl.int64), tl.load(cu_seqlens + segment + 1).to(tl.int64)
        passed = tl.zeros([COLUMNS], tl.float32)
        for first in range(lo, hi, CHUNK):
            tokens, inside = first + o_t, first + o_t < hi
            p_v = v + tokens[:, None] * v_token + head * v_head + o_r[None, :]
            value = tl.load(p_v, mask=inside[:, None] & in_v[None, :], other=0.0).to(tl.float32)
            if DELTA:
                p_w = w + (tokens[:, None] * heads + head) * K + o_k[None, :]
                reads = tl.load(p_w, mask=inside[:, None] & in_k[None, :], other=0.0)
                value -= _dot(reads, tl.trans(state), w, HALF)
            elif HAS_BETA:
                strength = tl.load(beta + tokens * beta_token + head * beta_head, mask=inside, other=0.0)
                value *= strength.to(tl.float32)[:, None]
            key = _load_keys(k + (head // GROUP) * k_head, tokens, inside, k_token, o_k, in_k, epsilon, L2NORM)
            state, key, value, whole = _decayed(
                state, key, value, g + head * g_head, tokens, inside, g_token, o_k, in_k, DIAGONAL
            )
            passed += whole
            state += _dot(tl.trans(value), key, k, HALF)
        p_state = end_state + entry * state_entry + head * state_head + o_r[:, None] * state_row + o_k[None, :]
        tl.store(p_state, state.to(end_state.dtype.element_ty), mask=in_v[:, None] & in_k[None, :])
        if DELTA:
            if HAS_T:
                own = (o_r < K)[:, None] & in_k[None, :] & is_t
                p_t = transition + entry * t_entry + head * t_head + o_r[:, None] * t_row + o_k[None, :]
                tl.store(p_t, state.to(transition.dtype.element_ty), mask=own)
                if HAS_FLAGS:
                    blocks = tl.cdiv(K, ROWS)
                    p_largest = largest + (segment * heads + head) * blocks + block - tl.cdiv(V, ROWS)
                    tl.store(p_largest, tl.max(tl.max(tl.abs(state), 1), 0), mask=is_t)
        elif HAS_T:
            kept = tl.exp(passed)
            _store_decay(transition + entry * t_entry + head * t_head, kept, o_k, in_k, block == 0, DIAGONAL)
            if HAS_FLAGS:
                flag = tl.max(tl.where(in_k, kept, 0.0), 0) <= vanishing_below
                tl.store(vanishing + entry * flag_entry + head * flag_head, flag.to(tl.uint8), mask=block == 0)


@triton.jit(do_not_specialize=["entry_count"], do_not_specialize_on_alignment=["entries"])
def flag_kernel(
    largest,
    entries,
    vanishing,
    entry_count,
    flag_entry,
    flag_head,
    vanishing_below,
    heads,
    blocks,
    BLOCKS: tl.constexpr,
):
    """grid [heads, segments]. largest [segments, heads, blocks]: the largest element of each block of T."""
    head, segment = tl.program_id(0), tl.program_id(1)
    entry = tl.load(entries + segment).to(tl.int64)
    if (entry >= 0) & (entry < entry_count):
        o_b = tl.arange(0, BLOCKS)
        values = tl.load(largest + (segment * heads + head) * blocks + o_b, mask=o_b < blocks, other=0.0)
        flag = (tl.max(values, 0) <= vanishing_below).to(tl.uint8)
        tl.store(vanishing + entry * flag_entry + head * flag_head, flag)


def chunk_transition(plan: Plan) -> None:
    """See sglang_hybrid_kernels.chunk_transition; pools are floating."""
    tokens, heads, dv = plan.v.shape
    dk, segments = plan.k.shape[2], plan.entries.numel()
    require_grid("segments", segments)
    cu_seqlens, entries = plan.cu_seqlens.contiguous(), plan.entries.contiguous()
    beta = plan.g if plan.beta is None else plan.beta
    half = plan.k.element_size() == 2
    sizes = {"V": dv, "K": dk, "GROUP": heads // plan.k.shape[1], "CHUNK": CHUNK, "HALF": half}
    sizes |= {"COLUMNS": max(16, triton.next_power_of_2(dk)), "DIAGONAL": plan.diagonal, "L2NORM": plan.l2norm}
    sizes |= {"HAS_BETA": plan.beta is not None}
    inputs = (*plan.g.stride()[:2], *beta.stride()[:2])
    registers = {} if half else {"maxnreg": 255}  # else ptxas settles for 32 on sm_80 and spills seven kilobytes
    w, v = plan.k, plan.v
    if plan.delta:
        w, u = (plan.k.new_empty(tokens, heads, d, dtype=plan.k.dtype if half else torch.float32) for d in (dk, dv))
        solve_kernel[(tokens // CHUNK + segments, heads)](
            plan.k, plan.v, plan.g, beta, w, u, cu_seqlens, segments, *plan.k.stride()[:2], *plan.v.stride()[:2],
            *inputs, NORM_EPSILON, heads, **sizes, VALUES=64, num_warps=8, num_stages=1,
        )  # fmt: skip
        v = u
    transition = plan.end_state if plan.transition is None else plan.transition
    t_strides = (*transition.stride()[:2], transition.stride(2) if transition.dim() == 4 else 0)
    flags = None if plan.vanishing is None else plan.vanishing.view(torch.uint8)
    flag_strides = (0, 0) if flags is None else flags.stride()
    initial = plan.end_state if plan.initial is None else plan.initial
    slots = entries if plan.initial_slots is None else plan.initial_slots.contiguous()
    t_blocks = triton.cdiv(dk, ROWS) if plan.delta and plan.transition is not None else 0
    largest = plan.g.new_empty(segments, heads, max(t_blocks, 1), dtype=torch.float32)
    advance_kernel[(triton.cdiv(dv, ROWS) + t_blocks, heads, segments)](
        plan.k, v, plan.g, beta, w, cu_seqlens, entries, plan.end_state, transition,
        largest if flags is None else flags, largest, initial, slots, plan.end_state.shape[0], initial.shape[0],
        *plan.k.stride()[:2], *v.stride()[:2], *inputs, *plan.end_state.stride()[:3], *t_strides, *flag_strides,
        *initial.stride()[:3], NORM_EPSILON, plan.vanishing_below, heads, **sizes, ROWS=ROWS, DELTA=plan.delta,
        HAS_T=plan.transition is not None, HAS_FLAGS=flags is not None, HAS_INITIAL=plan.initial is not None,
        num_warps=4 if half and not plan.diagonal else 8, num_stages=2, **registers,
    )  # fmt: skip
    if flags is not None and plan.delta:
        flag_kernel[(heads, segments)](
            largest, entries, flags, plan.end_state.shape[0], *flag_strides, plan.vanishing_below, heads, t_blocks,
            BLOCKS=triton.next_power_of_2(t_blocks), num_warps=1,
        )  # fmt: skip
