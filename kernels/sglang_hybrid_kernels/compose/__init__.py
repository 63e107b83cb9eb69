"""Running states carried over chains of cached segments: S <- T S + S_C."""

from __future__ import annotations

from torch import Tensor

from sglang_hybrid_kernels.compose import naive
from sglang_hybrid_kernels.compose.check import Operators, Plan
from sglang_hybrid_kernels.dispatch import backend_for


def compose(
    pool: Tensor,
    source: Tensor,
    destination: Tensor,
    chain: Tensor,
    chain_offsets: Tensor,
    transition: Tensor,
    end_state: Tensor,
    *,
    transition_scale: Tensor | None = None,
    end_state_scale: Tensor | None = None,
    transition_rows: Tensor | None = None,
    tree_groups: int = 1,
    check_slots: bool = True,
) -> None:
    """Write pool[:, destination[r]] = the state of pool[:, source[r]] after the segments of chain r, for all rows r.

    One launch takes every row, layer and head; the state stays in fp32 registers from the first segment to the last and
    is rounded once, to the pool's type. With float64 everywhere, the naive path computes in float64.

    pool             [layers, slots, heads, V, K] float. Live states, one per slot (Mamba2: V head_dim, K d_state).
    source           [rows] slot of the initial state; -1 starts from zero.
    destination      [rows] slot that is written; -1 skips the row. No row may use a slot that another one writes.
    chain            [n] segment entries, in the order of the text.
    chain_offsets    [rows + 1] row r owns chain[chain_offsets[r] : chain_offsets[r + 1]]; an empty chain copies.
    transition       T_C of each entry. Its dimensions say the family:
                     dense (GDN, KDA)   [layers, entries, heads, K, K], stored transposed: [..., j, i] = T[i, j],
                                        so that a V-first state composes as S @ transition + end_state;
                     diagonal (GLA)     [layers, entries, heads, K];
                     scalar (Mamba2)    [layers, entries, heads].
    end_state        [layers, entries, heads, V, K], S_C: the segment's state from a zero start.
    *_scale          [layers, entries, heads, K] float, for int8 storage: value = int8 * scale of its last axis.
    transition_rows  [layers, entries, heads] int32 or int64, dense only. `transition` is then a pool [rows, K, K], its
                     scale [rows, K], and this names the row with an entry's and head's T_C, in any order, also one row
                     several times. Negative: T_C counts as zero and is not read; the state becomes S_C. Rows may
                     overlap in memory (any stride of the first dimension) where only some of their numbers are meant.
                     Their stride should be a multiple of 16 elements: by any other, Triton loads element by element.
    tree_groups      dense only. 1 composes in order. g > 1 first composes each chain's g equal parts into operators, in
                     parallel, then chains those: more multiplications (K more columns), 1/g of the serial steps.

    Reduction order depends on the row's own chain and on tree_groups, never on what else is in the batch: a row's bits
    are the same alone and in company. Different tree_groups give different rounding.

    check_slots=False leaves out the checks that read source, destination, chain, chain_offsets and transition_rows,
    which on a GPU wait for the device; their values are then trusted. Raises ValueError for bad input, before anything
    is written.
    Source: HYPIC, composition of linear recurrences (T_2 T_1, T_2 S_1 + S_2).
    """
    operators = Operators(transition, end_state, transition_scale, end_state_scale, transition_rows)
    plan = Plan(pool, source, destination, chain, chain_offsets, operators, tree_groups)
    plan.check(check_slots)
    if not source.numel() or not pool.numel():
        return
    if backend_for(pool) == "triton":
        from sglang_hybrid_kernels.compose import triton

        triton.compose(plan)
    else:
        naive.compose(plan)


__all__ = ["compose"]
