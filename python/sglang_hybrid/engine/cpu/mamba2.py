"""Mamba-2 state space duality (Dao and Gu 2024, arXiv 2405.21060, section 6): chunked scan and one-token update.

State layout [slots, H, P, N]: heads, head dimension, state size. B and C have G groups of H / G heads each.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_hybrid.engine.cpu.slots import advance_rows, read
from sglang_hybrid.engine.cpu.speculation.candidates import follow
from sglang_hybrid.engine.cpu.varlen import CHUNK, ChunkPlan

_NO_LIMIT = (0.0, float("inf"))
_BLOCK_ELEMENTS = 1 << 18
_LEAST_DECAY = -80.0
"""Limits with the meaning they have in gdn.py."""


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    out: Tensor | None = None,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    return_track_states: bool = False,
    track_seq_idx: Tensor | None = None,
    track_end_locs: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Scan packed sequences: x [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N]; writes out [1, T, H, P].

    Sequence i covers tokens cu_seqlens[i] to cu_seqlens[i + 1] and starts from initial_states[i] (default: zeros).
    Returns (h, last, tracked) with return_track_states, (h, last) otherwise: last [sequences, H, P, N] are the final
    states; tracked [1, n, H, P, N] the states of sequences track_seq_idx just before packed tokens track_end_locs, or
    None; h [1, ., H, P, N] the states on SGLang's checkpoint grid, see _on_grid and _on_grid_by_sequence.
    seq_idx, chunk_indices and chunk_offsets restate cu_seqlens and are not needed.
    """
    if z is not None or return_final_states or not return_varlen_states or out is None or cu_seqlens is None:
        raise NotImplementedError("the CPU platform's Mamba-2 scan takes packed sequences, an output buffer and no z")
    plan = ChunkPlan.of(cu_seqlens.tolist(), min(CHUNK, chunk_size))
    scan = _Scan(plan, x[0], _step_sizes(dt[0], dt_bias, dt_softplus, dt_limit), A.float(), B[0], C[0], initial_states)
    y = scan.output
    if D is not None:
        y = y + x[0].float() * D.float().view(x.shape[2], -1)
    out[0] = y
    to = state_dtype or x.dtype
    tracked = None
    if track_seq_idx is not None and track_end_locs is not None and track_end_locs.numel():
        wanted = zip(track_seq_idx.tolist(), track_end_locs.tolist(), strict=True)
        tracked = torch.stack([scan.state_before(*where) for where in wanted]).to(to).unsqueeze(0)
    h = _on_grid(scan, chunk_size) if return_track_states else _on_grid_by_sequence(scan, chunk_size)
    result = (h.to(to).unsqueeze(0), scan.last.to(to))
    return (*result, tracked) if return_track_states else result


def _step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float]) -> Tensor:
    dt = dt.float()
    if bias is not None:
        dt = dt + bias.float()
    if softplus:
        dt = F.softplus(dt)
    return dt if tuple(limit) == _NO_LIMIT else dt.clamp(*limit)


class _Scan:
    """One scan: the output [T, H, P] without D, and the states at chunk starts and sequence ends."""

    def __init__(
        self, plan: ChunkPlan, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial: Tensor | None
    ) -> None:
        self.plan, self.x, self.dt, self.A, self.B = plan, x, dt, A, B
        _, heads, p = x.shape
        shape = (len(plan.counts), heads, p, B.shape[2])
        self.last = x.new_zeros(shape, dtype=torch.float32) if initial is None else initial.float().clone()
        state, outputs, starts = self.last[plan.order], [], []
        for first, last, widths in plan.blocks(_BLOCK_ELEMENTS // (heads * plan.length**2)):
            tensors = (plan.padded(t, first, last) for t in (x, dt, B, C))
            y, states, state, ended = _block(*tensors, A, state, widths)
            outputs.append(y)
            starts.append(states)
            for rank, final in ended:
                self.last[plan.order[rank]] = final
        self.output = plan.packed(torch.cat(outputs)) if outputs else x.float()
        self.starts = torch.cat(starts) if starts else self.last[:0]

    def state_before(self, sequence: int, token: int) -> Tensor:
        """[H, P, N] state of `sequence` just before packed token `token`, for any token up to the sequence's end."""
        lo, hi = self.plan.bounds[sequence : sequence + 2]
        if token == hi:
            return self.last[sequence]
        chunk, past = divmod(token - lo, self.plan.length)
        start = self.starts[self.plan.chunk_index(sequence, chunk)]
        if past == 0:
            return start
        now = slice(token - past, token)
        parts = (t[now].float().unsqueeze(0) for t in (self.x, self.dt, self.B))
        _, _, after, _ = _block(*parts, None, self.A, start.unsqueeze(0), [1, 1])
        return after[0]


def _block(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor | None, A: Tensor, state: Tensor, widths: list[int]
) -> tuple[Tensor | None, Tensor, Tensor, list[tuple[int, Tensor]]]:
    """Run some waves: x [chunks, length, H, P], dt [., ., H], b, c [., ., G, N], as gdn._block; no output without c."""
    n, length, heads, p = x.shape
    groups, state_size = b.shape[2:]
    rep = heads // groups
    b = b.transpose(1, 2).contiguous()  # [n, G, L, N]
    total = (dt * A).cumsum(1)  # [n, L, H]
    x = x * dt.unsqueeze(-1)
    fading = (total[:, -1:] - total).exp_().unsqueeze(-1)
    by_group = (x * fading).view(n, length, groups, rep * p).transpose(1, 2)  # heads of a group share one product
    added = torch.matmul(by_group.mT, b).view(n, heads, p, state_size)
    kept = total[:, -1].exp().view(n, heads, 1, 1)
    starts, ended, at = [], [], 0
    for width, following in pairwise(widths):
        rows = slice(at, at + width)
        after = torch.addcmul(added[rows], state, kept[rows])
        starts.append(state)
        ended += [(rank, after[rank]) for rank in range(following, width)]
        state, at = after[:following], at + width
    states = torch.cat(starts)
    if c is None:
        return None, states, state, ended
    c = c.transpose(1, 2).contiguous()
    total = total.transpose(1, 2).reshape(n, groups, rep, length, 1)
    weights = (total - total.mT).clamp_(_LEAST_DECAY, 0.0).exp_().mul_((c @ b.mT).unsqueeze(2)).tril_()
    y = weights @ x.view(n, length, groups, rep, p).permute(0, 2, 3, 1, 4)
    read = torch.matmul(c, states.view(n, groups, rep * p, state_size).mT).view(n, groups, length, rep, p)
    y.addcmul_(read.transpose(2, 3), total.exp_())
    return y.permute(0, 3, 1, 2, 4).reshape(n, length, heads, p), states, state, ended


def _on_grid(scan: _Scan, chunk_size: int) -> Tensor:
    """[ceil(T / chunk_size), H, P, N]: row j is the state just before packed token j * chunk_size.

    Rows that fall inside a chunk of their sequence are NaN: SGLang asks for those by track_end_locs.
    """
    bounds, length = scan.plan.bounds, scan.plan.length
    grid = range(0, scan.plan.tokens, chunk_size)
    h = scan.last.new_full((len(grid), *scan.last.shape[1:]), torch.nan)
    rows, sources = [], []
    for row, token in enumerate(grid):
        sequence = bisect_right(bounds, token) - 1
        chunk, past = divmod(token - bounds[sequence], length)
        if past == 0:
            rows.append(row)
            sources.append(scan.plan.chunk_index(sequence, chunk))
    if rows:
        h[rows] = scan.starts[sources]
    return h


def _on_grid_by_sequence(scan: _Scan, chunk_size: int) -> Tensor:
    """The layout SGLang 0.5.17 indexes: sequence i's state after j whole chunks is row j + (whole chunks before i)."""
    bounds = scan.plan.bounds
    whole = [(hi - lo) // chunk_size for lo, hi in pairwise(bounds)]
    h = scan.last.new_zeros((sum(whole) + 1, *scan.last.shape[1:]))
    row = 0
    for sequence, count in enumerate(whole):
        for chunk in range(1, count + 1):
            h[row + chunk] = scan.state_before(sequence, bounds[sequence] + chunk * chunk_size)
        row += count
    return h


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
) -> None:
    """One token per row: x, dt [R, H, P], A [H, P, N], B and C [R, G, N], D and dt_bias [H, P]; writes out [R, H, P].

    State [slots, H, P, N] is updated in place at state_batch_indices; a row whose slot is pad_slot_id reads zeros and
    writes nothing. SGLang expands per-head dt and A by stride 0; they are used per head then. With
    `disable_state_update` x, dt, B, C and out have `cache_steps` candidates in a second dimension, the pool stays as it
    is, and what candidates leave goes to rows of the buffer [rows, cache_steps, H, P, N].
    """
    if z is not None or out is None:
        raise NotImplementedError("the CPU platform's Mamba-2 update takes an output buffer and no z")
    if disable_state_update:
        if intermediate_states_buffer is None or intermediate_state_indices is None or state_batch_indices is None:
            raise NotImplementedError("on a CPU candidates leave their states in a buffer, and there is none")
        requests, nodes = x.shape[:2]

        def advance(node: int, states: Tensor) -> None:
            given = (t[:, node] for t in (x, dt))
            selective_state_update(
                states, *given, A, B[:, node], C[:, node], D, None, dt_bias, dt_softplus, out=out[:, node]
            )

        committed = read(state, state_batch_indices.tolist()[:requests])
        _, left = follow(committed, retrieve_parent_token, nodes, advance, state.dtype)
        intermediate_states_buffer[intermediate_state_indices[:requests].long(), :nodes] = left
        return
    if x.dim() != 3:
        raise NotImplementedError(f"the CPU platform decodes one token per row: x {tuple(x.shape)}")
    rows, heads, p = x.shape
    rep = heads // B.shape[1]
    step = _step_sizes(_per_head(dt, 1), None if dt_bias is None else _per_head(dt_bias, 1), dt_softplus, _NO_LIMIT)
    kept = (step.unsqueeze(-1) * _per_head(A, 2).unsqueeze(0)).exp_()  # [R, H, 1 or P, 1 or N]
    b, c = (t.float() if rep == 1 else t.float().repeat_interleave(rep, 1) for t in (B, C))
    xf = x.float()
    inputs = (kept, (xf * step).unsqueeze(-1), b.unsqueeze(2), c.unsqueeze(-1))
    slots = list(range(rows)) if state_batch_indices is None else state_batch_indices.tolist()
    slots = [-1 if slot == pad_slot_id else slot for slot in slots]
    y = advance_rows(state, slots, _step, inputs)
    if D is not None:
        y.addcmul_(xf, D.float())
    out.view(rows, heads, p).copy_(y)


def _step(state: Tensor, kept: Tensor, added: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Advance states [R, H, P, N] in place and read them: [R, H, P]."""
    state.mul_(kept).addcmul_(added, b)
    return torch.matmul(state, c).squeeze(-1)


def _per_head(t: Tensor, expanded: int) -> Tensor:
    """Undo an expansion by stride 0 of the last `expanded` dimensions: they come back with size 1."""
    for dim in range(-expanded, 0):
        if t.stride(dim) == 0:
            t = t.narrow(dim, 0, 1)
    return t.float()
