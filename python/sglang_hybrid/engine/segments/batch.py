"""A prefill batch with composed prompts, as index tensors: which tokens run, and what each layer reads and writes.

SGLang schedules the pass of a composed prompt as if all of its tokens were run. What reaches the model is a shorter
stream: of a plain request its tokens, of a composed one the segments that are made (*cold*, each by itself) and then
the tokens of its rows (*own*). The last token of a request stays last: its logits are what SGLang takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sglang_hybrid.engine.cache.requests import Checkpoint
from sglang_hybrid.segment.index import Entry
from sglang_hybrid.segment.passes import Pass


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed request: its `row` in the batch, its pass and ids, its slot of states, which only the device knows,
    and what it checkpoints."""

    row: int
    made: Pass
    ids: Sequence[int]
    state: Tensor
    table: int
    checkpoints: tuple[Checkpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Moves:
    """KV that is copied: from slots `source` of entries to `target`, places in SGLang's stream of slots ([tokens]).

    Copy i has the tokens from `bounds[i]` on, and turns their keys by `deltas[i]` positions.
    """

    source: Tensor
    target: Tensor
    bounds: Tensor
    deltas: Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """What the linear layers run: `tokens` of the stream, the own ones and then the cold ones, cut into rows.

    bounds [rows + 1], jump [rows] (a block, or -1), of_request [requests + 1] and states [requests] (a slot of SGLang's
    pool, or -1) are what `chunk_h_jump` takes; a segment that is made is a request without a slot. For the convolution
    rows are not cut by checkpoints: `wide` [n + 1] are their bounds, before which it looks back on the window of block
    `behind` or, where that is -1, on that of slot `after` (-1: on nothing). The window at the end of wide row
    `last[i]` goes to slot `last_states[i]`. Rows are cut into chunks of `chunk` tokens.
    """

    chunk: int
    tokens: Tensor
    bounds: Tensor
    host_bounds: list[int]
    of_request: Tensor
    states: Tensor
    jump: Tensor
    wide: Tensor
    wide_lengths: list[int]
    behind: Tensor
    after: Tensor
    last: Tensor
    last_states: Tensor


@dataclass(frozen=True, slots=True)
class Making:
    """Segments that are made, `entries` in `blocks`, with the slots `transitions` [segments, n] for those of all layers
    and heads: `tokens` of the stream, cut at `bounds`, at `positions` from their start.

    Their interiors are `interior` of the linear tokens, cut at `interior_bounds`; `places` say where these are among
    the cold tokens, and `slots` where their KV is kept. `windows` [segments, window] of the linear tokens end there.
    """

    entries: tuple[Entry, ...]
    rows: list[tuple[int, int, int, int]]
    blocks: Tensor
    transitions: Tensor
    tokens: Tensor
    bounds: Tensor
    positions: Tensor
    longest: int
    interior: Tensor
    interior_bounds: Tensor
    places: Tensor
    slots: Tensor
    windows: Tensor


@dataclass(frozen=True, slots=True)
class Attended:
    """What own `tokens` of the stream attend to: request r has those from `bounds[r]` on, at `positions` of its prompt.

    Its KV lies in `cells` of SGLang's table [requests, context] of slots, flattened, from `cell_bounds[r]` on. `rows`
    says the same on the host: (first token, last one + 1, first cell, last one + 1); tokens see the cells before them.
    """

    rows: list[tuple[int, int, int, int]]
    tokens: Tensor
    bounds: Tensor
    positions: Tensor
    cells: Tensor
    cell_bounds: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class Saves:
    """States that are saved: those before `chunks`, whose `windows` [n, window] are linear tokens, then those that the
    pass leaves in the slots `finals`; into the slots of `checkpoints`, in this order."""

    chunks: Tensor
    windows: Tensor
    finals: Tensor
    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class PassBatch:
    """One batch. `take` [tokens] indexes SGLang's stream with the ids `extra` behind it; `lengths` are by request.

    `plain` are the tokens of requests that are not composed, `plain_rows` these requests, `plain_at` on the device.
    """

    take: Tensor
    extra: Tensor
    positions: Tensor
    lengths: list[int]
    plain: Tensor
    plain_rows: list[int]
    plain_at: Tensor
    linear: Linear
    attended: Attended
    early: Moves | None
    late: Moves | None
    making: Making | None
    saves: Saves | None
