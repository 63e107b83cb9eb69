"""Mamba-2 state space duality (Dao and Gu 2024, arXiv 2405.21060, section 6): chunked scan and one-token update.

State layout [slots, H, P, N]: heads, head dimension, state size. B and C have G groups of H / G heads each.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cpu.varlen import CHUNK, ChunkPlan

_NO_LIMIT = (0.0, float("inf"))


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
    y = scan.output()
    if D is not None:
        y += x[0].float() * D.float().view(x.shape[2], -1)
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
    """One scan: the states at all chunk starts and sequence ends, and from them the output and any other state."""

    def __init__(
        self, plan: ChunkPlan, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial: Tensor | None
    ) -> None:
        self.plan = plan
        _, heads, p = x.shape
        groups, state_size = B.shape[1:]
        self.shape = (groups, heads // groups, p, state_size)
        empty = x.new_zeros((len(plan.counts), heads, p, state_size), dtype=torch.float32)
        self.last = empty if initial is None else initial.float().clone()
        if plan.chunks == 0:
            self.starts = empty[:0]
            return
        n, length = plan.chunks, plan.length
        split = (n, length, groups, heads // groups)
        self.x = plan.scatter(x).view(*split, p).permute(0, 2, 3, 1, 4)  # [n, G, r, L, P]
        self.b, self.c = (plan.scatter(t).transpose(1, 2).contiguous() for t in (B, C))  # [n, G, L, N]
        dt = plan.scatter(dt).view(split).permute(0, 2, 3, 1).contiguous()  # [n, G, r, L]
        self.dt = dt
        self.total = (dt * A.view(groups, -1, 1)).cumsum(-1)
        fading = (self.total[..., -1:] - self.total).exp_().mul_(dt).unsqueeze(-1)
        added = torch.matmul(self._by_group(self.x * fading).mT, self.b).view(n, heads, p, state_size)
        self._pass_states(added, self.total[..., -1].exp().view(n, heads, 1, 1))

    def _by_group(self, x: Tensor) -> Tensor:
        """[n, G, r, L, P] -> [n, G, L, r * P]: heads of a group side by side, so that they share one product."""
        return x.transpose(2, 3).flatten(3)

    def _pass_states(self, added: Tensor, kept: Tensor) -> None:
        plan, starts = self.plan, []
        state = self.last[plan.order]
        for wave, width in enumerate(plan.widths):
            rows = slice(plan.offsets[wave], plan.offsets[wave + 1])
            starts.append(state)
            state = torch.addcmul(added[rows], state, kept[rows])
            following = plan.widths[wave + 1] if wave + 1 < len(plan.widths) else 0
            if following < width:
                self.last[plan.order[following:width]] = state[following:]
                state = state[:following]
        self.starts = torch.cat(starts)

    def output(self) -> Tensor:
        """[T, H, P] float32, without the skip connection D."""
        n, length = self.plan.chunks, self.plan.length
        groups, rep, p, state_size = self.shape
        if n == 0:
            return self.last.new_zeros((0, groups * rep, p))
        future = torch.ones(length, length, dtype=torch.bool).triu_(1)
        weights = (self.total.unsqueeze(-1) - self.total.unsqueeze(-2)).masked_fill_(future, -torch.inf).exp_()
        weights.mul_(torch.matmul(self.c, self.b.mT).unsqueeze(2)).mul_(self.dt.unsqueeze(-2))
        y = torch.matmul(weights, self.x)
        read = torch.matmul(self.c, self.starts.view(n, groups, rep * p, state_size).mT)
        y.addcmul_(read.view(n, groups, length, rep, p).transpose(2, 3), self.total.exp().unsqueeze(-1))
        return self.plan.gather(y.permute(0, 3, 1, 2, 4).reshape(n, length, groups * rep, p))

    def state_before(self, sequence: int, token: int) -> Tensor:
        """[H, P, N] state of `sequence` just before packed token `token`, for any token up to the sequence's end."""
        lo, hi = self.plan.bounds[sequence : sequence + 2]
        if token == hi:
            return self.last[sequence]
        chunk, past = divmod(token - lo, self.plan.length)
        index = self.plan.chunk_index(sequence, chunk)
        start = self.starts[index]
        if past == 0:
            return start
        total = self.total[index, :, :, :past]
        fading = (total[..., -1:] - total).exp_().mul_(self.dt[index, :, :, :past]).unsqueeze(-1)
        x = (self.x[index, :, :, :past] * fading).transpose(1, 2).flatten(2)
        added = torch.matmul(x.mT, self.b[index, :, :past]).view_as(start)
        return torch.addcmul(added, start, total[..., -1].exp().reshape(-1, 1, 1))


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
    **speculative: object,
) -> None:
    """One token per row: x, dt [R, H, P], A [H, P, N], B and C [R, G, N], D and dt_bias [H, P]; writes out [R, H, P].

    State [slots, H, P, N] is updated in place at state_batch_indices; a row whose slot is pad_slot_id reads zeros and
    writes nothing. SGLang expands per-head dt and A by stride 0; they are used per head then.
    """
    if disable_state_update or x.dim() != 3 or any(value is not None for value in speculative.values()):
        raise ConfigError(
            f"the CPU platform decodes one token at a time; start without --speculative-algorithm: x {tuple(x.shape)}"
        )
    if z is not None or out is None:
        raise NotImplementedError("the CPU platform's Mamba-2 update takes an output buffer and no z")
    rows, heads, p = x.shape
    rep = heads // B.shape[1]
    step = _step_sizes(_per_head(dt, 1), None if dt_bias is None else _per_head(dt_bias, 1), dt_softplus, _NO_LIMIT)
    kept = (step.unsqueeze(-1) * _per_head(A, 2)).exp_()  # [R, H, 1 or P, 1 or N]
    b, c = (t.float() if rep == 1 else t.float().repeat_interleave(rep, 1) for t in (B, C))
    xf = x.float()
    slots = list(range(rows)) if state_batch_indices is None else state_batch_indices.tolist()
    live = [row for row, slot in enumerate(slots) if slot != pad_slot_id]
    in_place = rows == 1 and bool(live) and state.dtype == torch.float32
    if in_place:
        s = state[slots[0]].unsqueeze(0)
    else:
        s = state.index_select(0, torch.tensor(slots).clamp_(min=0)).float()
        if len(live) < rows:
            s[[row for row in range(rows) if row not in live]] = 0.0
    s.mul_(kept).addcmul_((xf * step).unsqueeze(-1), b.unsqueeze(2))
    y = torch.matmul(s, c.unsqueeze(-1)).squeeze(-1)
    if D is not None:
        y.addcmul_(xf, D.float())
    if not in_place and live:
        state[[slots[row] for row in live]] = (s if len(live) == rows else s[live]).to(state.dtype)
    out.view(rows, heads, p).copy_(y)


def _per_head(t: Tensor, expanded: int) -> Tensor:
    """Undo an expansion by stride 0 of the last `expanded` dimensions: they come back with size 1."""
    for dim in range(-expanded, 0):
        if t.stride(dim) == 0:
            t = t.narrow(dim, 0, 1)
    return t.float()
