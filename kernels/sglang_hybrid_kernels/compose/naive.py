"""Specification of `compose`."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_hybrid_kernels.compose.check import Operators, Plan

Operator = tuple[Tensor, Tensor]
"""(transition, end_state) of a stretch of text, as stored: dense transitions transposed."""


def compose(plan: Plan) -> None:
    """Carries every row's state over its chain, in order or by `tree_groups` parts, each composed first."""
    pool, bounds = plan.pool, plan.chain_offsets.tolist()
    wide = torch.promote_types(torch.float32, pool.dtype)
    results = []
    for row, (source, destination) in enumerate(zip(plan.source.tolist(), plan.destination.tolist(), strict=True)):
        state = pool[:, source].to(wide) if source >= 0 else torch.zeros_like(pool[:, 0], dtype=wide)
        entries = plan.chain[bounds[row] : bounds[row + 1]].tolist()
        operators = [operator(plan.operators, entry, wide) for entry in entries]
        if plan.tree_groups > 1:
            parts = [operators[part] for part in parts_of(len(operators), plan.tree_groups)]
            operators = [fold(part) for part in parts if part]
        for transition, end_state in operators:
            state = applied(state, transition) + end_state
        results.append((destination, state))
    for destination, state in results:
        if destination >= 0:
            pool[:, destination] = state.to(pool.dtype)


def operator(stored: Operators, entry: int, dtype: torch.dtype) -> Operator:
    """One entry of [layers, entries, heads, ...] over all layers, in `dtype`; zero where it has no transition."""
    end_state = stored.end_state[:, entry].to(dtype)
    if stored.end_state_scale is not None:
        end_state = end_state * stored.end_state_scale[:, entry].to(dtype)[..., None, :]
    if stored.transition_rows is None:
        return _transition(stored, (slice(None), entry), dtype), end_state
    rows = stored.transition_rows[:, entry]
    kept = rows >= 0
    transition = end_state.new_zeros(*rows.shape, *stored.transition.shape[1:])
    transition[kept] = _transition(stored, (rows[kept],), dtype)
    return transition, end_state


def _transition(stored: Operators, at: tuple[slice | int | Tensor, ...], dtype: torch.dtype) -> Tensor:
    """The transitions that this index picks, in `dtype`."""
    transition = stored.transition[at].to(dtype)
    if stored.transition_scale is not None:
        scale = stored.transition_scale[at].to(dtype)
        transition = transition * (scale[..., None, :] if transition.ndim > scale.ndim else scale)
    return transition


def applied(state: Tensor, transition: Tensor) -> Tensor:
    """T S for states [layers, heads, V, K] and a transition [layers, heads], [.., K] or [.., K, K] (transposed)."""
    if transition.ndim == 4:
        return state @ transition
    return state * (transition[..., None, :] if transition.ndim == 3 else transition[..., None, None])


def joined(first: Operator, second: Operator) -> Operator:
    """The operator of `first` followed by `second`: (T_2 T_1, T_2 S_1 + S_2)."""
    transition = first[0] @ second[0] if first[0].ndim == 4 else first[0] * second[0]
    return transition, applied(first[1], second[0]) + second[1]


def fold(operators: list[Operator]) -> Operator:
    """The operator of a non-empty chain, in order."""
    result = operators[0]
    for following in operators[1:]:
        result = joined(result, following)
    return result


def parts_of(length: int, groups: int) -> list[slice]:
    """`length` items cut into `groups` parts of ceil(length / groups); late parts may be shorter or empty."""
    size = -(-length // groups)
    return [slice(min(g * size, length), min((g + 1) * size, length)) for g in range(groups)]
