"""Puts a `PassBatch` together from the passes of its composed requests, and sends it to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from sglang_hybrid.engine.cache.requests import Checkpoint
from sglang_hybrid.engine.pools import copies
from sglang_hybrid.engine.segments.batch import Attended, Composed, Linear, Making, Moves, PassBatch, Saves
from sglang_hybrid.segment.index import Entry
from sglang_hybrid.segment.passes import Row

CHUNK, SHORT_CHUNK = 64, 16
"""Tokens of a chunk of the linear layers, and where all rows are short: seams of eight tokens fill one."""
SHORT_ROW = 64


_Lists = dict[str, Sequence[int] | np.ndarray]
_MOVED = ("source", "target", "bounds", "deltas")  # of Moves


@dataclass(slots=True)
class _Draft:
    """Lists that the requests of a batch are entered into, one after the other; names as in the classes of `batch`.

    Slots of states are numbers of `held`, where the device finds them.
    """

    begins: list[int]
    held: list[Tensor] = field(default_factory=list)
    take: list[int] = field(default_factory=list)
    extra: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)
    plain_rows: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    own_positions: list[int] = field(default_factory=list)
    own_bounds: list[int] = field(default_factory=lambda: [0])
    rows: list[int] = field(default_factory=list)  # lengths
    row_ends: list[int] = field(default_factory=list)  # of each own request
    jump: list[int] = field(default_factory=list)
    wide: list[int] = field(default_factory=list)  # lengths
    behind: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    seen: list[tuple[int, int, int, int]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    last_states: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    cells: list[np.ndarray] = field(default_factory=list)
    cell_counts: list[int] = field(default_factory=list)
    cold: list[tuple[Entry, int, int, int, int]] = field(default_factory=list)  # first place, tokens, head, interior
    inside: list[tuple[int, int, Checkpoint]] = field(default_factory=list)  # row behind it, own token behind it
    finals: list[tuple[int, Checkpoint]] = field(default_factory=list)
    moves: dict[bool, list[tuple[Entry, int, int, int, int]]] = field(default_factory=lambda: {False: [], True: []})

    def add_plain(self, row: int, prefix: int, length: int) -> None:
        place, begin = len(self.take), self.begins[row]
        self.take += range(begin, begin + length)
        self.positions += range(prefix, prefix + length)
        self.plain += range(place, place + length)
        self.plain_rows.append(row)
        self.lengths.append(length)

    def add(self, each: Composed, prefix: int, context: int, window: int, fresh: set[int]) -> None:
        made, begin, state = each.made, self.begins[each.row] - each.made.start, len(self.held)
        self.held.append(each.state.view(1).long())
        before = len(self.take)
        for cold in made.cold:
            low, high = cold.interior
            self.cold.append((cold.entry, len(self.take), cold.tokens, low - cold.start, high - low))
            self.take += range(self.begins[-1] + len(self.extra), self.begins[-1] + len(self.extra) + cold.tokens)
            self.extra += each.ids[cold.start : cold.end]
            self.positions += range(cold.tokens)
        at = {checkpoint.position: checkpoint for checkpoint in each.checkpoints}
        first_row = len(self.rows)
        for row in made.rows:
            self._row(row, begin, state if len(self.rows) == first_row and prefix else -1, at, window)
        if made.pending is None and made.end in at:
            self.finals.append((state, at[made.end]))
        self.own_bounds.append(len(self.own))
        self.row_ends.append(len(self.rows))
        self.states.append(state)
        if made.rows:  # else it only makes a segment
            self.last.append(len(self.wide) - 1)
            self.last_states.append(state)
        self.cells.append(np.arange(each.table * context, each.table * context + made.end))
        self.cell_counts.append(made.end)
        for copy in made.copies:
            late = id(copy.entry) in fresh
            self.moves[late].append((copy.entry, copy.first, begin + copy.at, copy.tokens, copy.delta))
        self.lengths.append(len(self.take) - before)

    def _row(self, row: Row, begin: int, state: int, at: dict[int, Checkpoint], window: int) -> None:
        place = len(self.take)
        self.take += range(begin + row.start, begin + row.end)
        self.positions += range(row.start, row.end)
        block = -1 if row.jump is None else row.jump.block
        cuts = [p for p in sorted(at) if max(row.start, row.start + window - 1) < p < row.end]
        jump = block
        for low, high in zip([row.start, *cuts], [*cuts, row.end], strict=True):
            if low != row.start:
                self.inside.append((len(self.rows), len(self.own) + low - row.start, at[low]))
            self.rows.append(high - low)
            self.jump.append(jump)
            jump = -1
        if row.tokens:
            cell = sum(self.cell_counts)
            self.seen.append((len(self.own), len(self.own) + row.tokens, cell, cell + row.end))
        self.own += range(place, place + row.tokens)
        self.own_positions += range(row.start, row.end)
        self.wide.append(row.tokens)
        self.behind.append(block)
        self.after.append(state if block < 0 else -1)


def build(
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    composed: Sequence[Composed],
    context: int,
    window: int,
    device: torch.device,
) -> PassBatch:
    """The batch whose requests extend by `extend_lens` behind `prefix_lens`, those in `composed` by their passes.

    `context` is the width of SGLang's table of slots; `window` what a convolution looks back on.
    """
    draft = _Draft(list(accumulate(extend_lens, initial=0)))
    by_row = {each.row: each for each in composed}
    fresh = {id(cold.entry) for each in composed for cold in each.made.cold}
    for row, (prefix, length) in enumerate(zip(prefix_lens, extend_lens, strict=True)):
        if row in by_row:
            draft.add(by_row[row], prefix, context, window, fresh)
        else:
            draft.add_plain(row, prefix, length)
    return _sent(draft, window, device)


def _sent(draft: _Draft, window: int, device: torch.device) -> PassBatch:
    own, made = len(draft.own), len(draft.cold)
    cold_tokens = [n for _, _, n, _, _ in draft.cold]
    bounds = list(accumulate((*draft.rows, *cold_tokens), initial=0))
    wide = [*draft.wide, *cold_tokens]
    chunk = SHORT_CHUNK if not made and max(draft.rows, default=0) <= SHORT_ROW else CHUNK
    moved = {"early": draft.moves[False], "late": draft.moves[True]}
    lists = _run(draft, bounds, wide, chunk, window)
    for name, moves in moved.items():
        lists |= _moved(name, moves)
    at = _send(lists | _made(draft, window), device)
    held = torch.cat([*draft.held, at["take"].new_full((1,), -1)])  # the last one is that of -1
    at |= {name: held[at[name]] for name in ("states", "after", "last_states", "finals")}
    linear = Linear(
        chunk, at["linear"], at["bounds"], bounds, at["of_request"], at["states"], at["jump"], at["wide"], wide,
        at["behind"], at["after"], at["last"], at["last_states"],
    )  # fmt: skip
    attended = Attended(
        draft.seen, at["linear"][:own], at["own_bounds"], at["own_positions"], at["cells"], at["cell_bounds"],
        max(draft.cell_counts),
    )  # fmt: skip
    making = None
    if made:
        cold_bounds = accumulate(cold_tokens, initial=0)
        making = Making(
            tuple(entry for entry, *_ in draft.cold), [(a, b, a, b) for a, b in pairwise(cold_bounds)], at["blocks"],
            at["transitions"].view(made, -1), at["linear"][own:], at["cold_bounds"],
            at["cold_positions"], max(wide[-made:]), at["interior"], at["interior_bounds"], at["places"],
            at["cold_slots"], at["cold_windows"].view(made, window),
        )  # fmt: skip
    early, late = (
        Moves(*(at[f"{name} {part}"] for part in _MOVED)) if moves else None for name, moves in moved.items()
    )
    kept = (*(checkpoint for _, _, checkpoint in draft.inside), *(checkpoint for _, checkpoint in draft.finals))
    saves = Saves(at["chunks"], at["windows"].view(len(draft.inside), window), at["finals"], kept) if kept else None
    return PassBatch(
        at["take"], at["extra"], at["positions"], draft.lengths, at["plain"], draft.plain_rows, at["plain_at"], linear,
        attended, early, late, making, saves,
    )  # fmt: skip


def _run(draft: _Draft, bounds: list[int], wide: list[int], chunk: int, window: int) -> _Lists:
    """Of the tokens that run: `bounds` are those of rows, the made segments' behind the requests' own."""
    rows, made = len(draft.rows), len(draft.cold)
    chunks = list(accumulate((-(-(b - a) // chunk) for a, b in pairwise(bounds)), initial=0))
    return {
        "take": draft.take,
        "positions": draft.positions,
        "extra": draft.extra,
        "plain": draft.plain,
        "plain_at": draft.plain_rows,
        "linear": [*draft.own, *(place for _, start, n, _, _ in draft.cold for place in range(start, start + n))],
        "bounds": bounds,
        "of_request": [0, *draft.row_ends, *range(rows + 1, rows + made + 1)],
        "states": [*draft.states, *[-1] * made],
        "jump": [*draft.jump, *[-1] * made],
        "wide": list(accumulate(wide, initial=0)),
        "behind": [*draft.behind, *[-1] * made],
        "after": [*draft.after, *[-1] * made],
        "last": draft.last,
        "last_states": draft.last_states,
        "own_bounds": draft.own_bounds,
        "own_positions": draft.own_positions,
        "cells": np.concatenate(draft.cells),
        "cell_bounds": list(accumulate(draft.cell_counts, initial=0)),
        "chunks": [chunks[row] for row, _, _ in draft.inside],
        "windows": [at for _, end, _ in draft.inside for at in range(end - window, end)],
        "finals": [state for state, _ in draft.finals],
    }


def _made(draft: _Draft, window: int) -> _Lists:
    """Of the segments that the pass makes; `interior` and `places` are where their kept tokens lie."""
    bounds = list(accumulate((n for _, _, n, _, _ in draft.cold), initial=0))
    kept = [range(b + head, b + head + n) for b, (_, _, _, head, n) in zip(bounds, draft.cold, strict=False)]
    own = len(draft.own)
    return {
        "blocks": [entry.block for entry, *_ in draft.cold],
        "transitions": np.concatenate([[], *(entry.transitions for entry, *_ in draft.cold)]),
        "cold_bounds": bounds,
        "cold_positions": [at for _, _, n, _, _ in draft.cold for at in range(n)],
        "interior": [own + at for each in kept for at in each],
        "interior_bounds": list(accumulate(map(len, kept), initial=0)),
        "places": [at for each in kept for at in each],
        "cold_slots": np.concatenate([[], *(entry.slots for entry, *_ in draft.cold)]),
        "cold_windows": [own + at for each in kept for at in range(each.stop - window, each.stop)],
    }


def _moved(name: str, moves: list[tuple[Entry, int, int, int, int]]) -> _Lists:
    if not moves:
        return {}
    lists: tuple[Sequence[int] | np.ndarray, ...] = (
        np.concatenate([entry.slots[first : first + n] for entry, first, _, n, _ in moves]),
        [at for _, _, start, n, _ in moves for at in range(start, start + n)],
        list(accumulate((n for _, _, _, n, _ in moves), initial=0)),
        [delta for *_, delta in moves],
    )
    return {f"{name} {part}": values for part, values in zip(_MOVED, lists, strict=True)}


def _send(lists: _Lists, device: torch.device) -> dict[str, Tensor]:
    """Whole numbers, in one copy."""
    parts = [np.asarray(values, np.int64) for values in lists.values()]
    sent = copies.send(np.concatenate(parts), device)
    return dict(zip(lists, sent.split([len(part) for part in parts]), strict=True))
