"""Several states out of one prefill: rows added to the index sets with which SGLang saves one.

SGLang's prefill kernels already produce states inside the prompt (`prefill_states`), and its tracking copies one of
them per request into a slot of the cache. The copy is an indexed assignment, so a second state of the same request is a
second row: no kernel changes, on a CPU or a GPU, with or without the extra buffer. A state inside a chunk is rolled
forward from the chunk's start by `sglang_hybrid_kernels.state_at` (kernels.py). Nothing here waits for the device: what
is computed on the host goes there in one copy from pinned memory. Ran on an H200, GDN by Triton's prefill.

Kimi delta attention copies a request's one state from a snapshot instead, so that its further rows are written behind
SGLang's own copy (`kernels.roll`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.passes.prefill_states import chunk_tokens, is_by_channel, is_in_graph, linear_backend
from sglang_hybrid.engine.cache.requests import Checkpoint, tracked
from sglang_hybrid.engine.speculation.heads import loses_input


@dataclass
class Pending:
    """Rows of the batch whose forward pass comes next, and its lengths, by which the pass knows them for its own.

    SGLang copies a ForwardBatch field by field on the way to the backend, so an attribute of ours would be lost.
    """

    rows: list[tuple[int, Checkpoint]]
    prefix_lens: list[int]
    extend_lens: list[int]

    def reached(self, window: int) -> Iterator[tuple[int, Checkpoint, int, int]]:
        """Rows whose state ends in this pass, and whose last `window` tokens lie in it.

        Each with its request's row, and the tokens of the request and of the batch before the state.
        """
        begins = list(accumulate(self.extend_lens, initial=0))
        for row, checkpoint in self.rows:
            offset = checkpoint.position - self.prefix_lens[row]
            if checkpoint.slot is not None and window <= offset <= self.extend_lens[row]:
                yield row, checkpoint, offset, begins[row] + offset


class _Source(IntEnum):
    """Where the pass leaves a state, and what the two numbers of a row say."""

    FINAL = 0  # behind the last token of a request: its row
    CHUNK = 1  # among the states the kernel gives back: the index there
    INSIDE = 2  # inside a chunk: the request's row, tokens of it
    AGAIN = 3  # inside a chunk that Mamba-2 computes again: the request's row, tokens of the batch


@dataclass(frozen=True)
class _Row:
    """A state to be saved: its two numbers, the row of its request, and the tokens before it, of the request in this
    pass (`offset`) and of the batch (`at`, where the window ends)."""

    source: _Source
    first: int
    second: int
    request: int
    offset: int
    at: int
    checkpoint: Checkpoint


@dataclass(frozen=True)
class _Inside:
    """States inside a chunk of the running pass: sequences, positions in them, and slots; each [n] int64."""

    sequences: Any
    positions: Any
    slots: Any


@dataclass(frozen=True)
class _Beside:
    """States at starts of chunks that SGLang's own copy leaves out: where the kernel puts them, and slots; each [n]."""

    chunks: Any
    slots: Any


@dataclass(frozen=True)
class Further:
    """States whose parts beside the pool are still to be saved: SGLang keeps them in `pools`, by the same slots.

    Of each the request's row, the tokens of the request and of the batch before it, and its slot; each [n] int64.
    """

    pools: Any
    rows: Any
    offsets: Any
    ends: Any
    slots: Any
    checkpoints: tuple[Checkpoint, ...]


_pending: Pending | None = None
_inside: _Inside | None = None
_beside: _Beside | None = None
_further: Further | None = None
_unmasked: Any = None  # metadata with rows of ours in a batch without a mask


def inside_chunks() -> _Inside | None:
    """What our kernel has to add to the running pass, None for nothing."""
    return _inside


def beside() -> _Beside | None:
    """Which states of the running pass SGLang leaves to us, None for none."""
    return _beside


def further() -> Further | None:
    """What of the running pass is saved once its parts beside the pool are, None for nothing."""
    return _further


def saved_further() -> None:
    """All parts of these states are there."""
    global _further
    for checkpoint in _further.checkpoints if _further is not None else ():
        checkpoint.written = True
    _further = None


def carry(_: Any, __: Any, batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of ForwardBatch.init_new: remember which row of the coming pass saves what.

    A draft model passes over the same prompts and has no states; a verification counts as an extension to SGLang. Of
    requests that decode in a mixed pass nothing is planned: their states lie behind their prompts.
    """
    global _pending
    if model_runner.is_draft_worker:
        return
    _pending = None
    mode = batch.forward_mode
    if not mode.is_extend() or mode.is_target_verify():
        return
    # Composed requests save their states themselves; what reaches SGLang's backends are the others.
    plain = [row for row, req in enumerate(batch.reqs) if tracked(req).composed is None]
    planned = [tracked(batch.reqs[row]).planned for row in plain]
    rows = [(row, c) for row, checkpoints in enumerate(planned) for c in checkpoints if c.slot is not None]
    if rows:
        _pending = Pending(rows, [batch.prefix_lens[row] for row in plain], [batch.extend_lens[row] for row in plain])


def take(metadata: Any, forward_batch: Any) -> Pending | None:
    """The rows of the pass that begins, None if it has none; they are given out once.

    None for a batch whose halves overlap: they may run in its place, and are planned behind it, by other backends.
    """
    global _pending
    pending, _pending = _pending, None
    if pending is None or metadata.query_start_loc is None or not forward_batch.forward_mode.is_extend():
        return None
    if getattr(forward_batch, "tbo_children", None):
        return None
    passed = list(forward_batch.extend_prefix_lens_cpu or ()), list(forward_batch.extend_seq_lens_cpu or ())
    return pending if passed == (pending.prefix_lens, pending.extend_lens) else None


def extend(_: Any, backend: Any, forward_batch: Any) -> None:
    """AFTER hook of init_forward_metadata of GDNAttnBackend, KDAAttnBackend and Mamba2AttnBackend: add the rows.

    Not where the linear layers run on index sets of a capture: those are made elsewhere, and the states stay unwritten.
    """
    global _beside, _further, _inside, _unmasked
    import torch

    _inside = _beside = _further = _unmasked = None
    metadata = backend.forward_metadata
    pending = take(metadata, forward_batch)
    if pending is None:
        return
    dispatcher = getattr(backend, "kernel_dispatcher", None)
    every = 0
    if getattr(dispatcher, "extend_uses_state_checkpoints", False):
        every = int(metadata.state_checkpoint_every_n_tokens) or compat.checkpoint_grid()
    window = int(backend.conv_states_shape[-1])
    pools = getattr(backend, "req_to_token_pool", None)
    others = compat.beside_states(getattr(pools, "mamba_pool", None))
    longest = max([window, *(tensor.shape[-1] for tensor in others)])
    rows = _rows(pending, chunk_tokens(backend), every, longest, one_grid=dispatcher is None)
    if not rows:
        return
    table, starts = _send(rows, window, _starts(pending, every) if every else [], metadata.query_start_loc.device)
    slots = backend._translate_mamba_indices(torch.cat([row.checkpoint.slot.view(-1) for row in rows]).long())

    add = partial(_append, metadata)
    finals, chunks, inside, again = _by_source(rows)
    add("track_conv_indices", table[:, 2:])
    add("conv_states_mask_indices", slots)
    add("track_ssm_final_src", metadata.mamba_cache_indices[table[finals, 0]].long())
    add("track_ssm_final_dst", slots[finals])
    if is_by_channel(backend):
        if chunks.start < chunks.stop:
            _beside = _Beside(table[chunks, 0], slots[chunks])
        chunks = slice(0, 0)
    add("track_ssm_h_src", table[chunks, 0])
    add("track_ssm_h_dst", slots[chunks])
    if dispatcher is None:
        add("track_ssm_seq_idx", table[again, 0])
        add("track_ssm_end_locs", table[again, 1])
        add("track_ssm_recompute_dst", slots[again])
    if every and chunks.start < chunks.stop and not metadata.num_state_checkpoints:
        metadata.state_checkpoint_cu_starts, metadata.num_state_checkpoints = starts, _starts(pending, every)[-1]
        metadata.state_checkpoint_every_n_tokens = every
    if inside.start < inside.stop:
        _inside = _Inside(table[inside, 0], table[inside, 1], slots[inside])
    if forward_batch.mamba_track_mask is None:
        _unmasked = metadata
    metadata.has_mamba_track_mask = True
    checkpoints = tuple(row.checkpoint for row in rows)
    if others:
        _further = Further(pools, *_places(rows, slots.device), slots, checkpoints)
        return
    for checkpoint in checkpoints:
        checkpoint.written = True


def _append(metadata: Any, name: str, values: Any) -> None:
    """Put `values` behind SGLang's own of that name."""
    import torch

    held = getattr(metadata, name, None)
    setattr(metadata, name, values if held is None else torch.cat([held, values.to(held.dtype)]))


def outside_a_graph(can: bool, runner: Any, batch: Any) -> bool | None:
    """AFTER hook of the choice of a CUDA graph for a prefill: a head that would lose its input, and a pass with rows of
    ours, run outside one.

    If it has the recurrent layers, what was planned at the capture is written there, and nothing else. Ranks agree on
    their rows; groups of data-parallel attention, which vote on graphs, do not, and their rows stay unwritten.
    """
    if not can:
        return None
    if loses_input(runner):
        return False
    if not _pending or batch.global_num_tokens_cpu is not None:
        return None
    return False if is_in_graph(linear_backend(runner.model_runner)) else None


def mix(original: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of Mamba2AttnBackend.forward."""
    run = partial(with_mask, original)
    return run(backend, *args, **kwargs) if mixing is None else mixing(run, backend, *args, **kwargs)


mixing: Any = None
"""Runs the layer for composed requests, and SGLang's for the others; None without segments."""


def with_mask(original: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Run Mamba2AttnBackend.forward: it copies states only if its batch has a mask of tracked requests.

    Without the extra buffer no batch has one, least of all the one that a CUDA graph keeps; nobody reads what is in it.
    """
    batch = kwargs.get("forward_batch", args[4] if len(args) > 4 else None)
    if batch is None or batch.mamba_track_mask is not None or _unmasked is not backend.forward_metadata:
        return original(backend, *args, **kwargs)
    batch.mamba_track_mask = True
    try:
        return original(backend, *args, **kwargs)
    finally:
        batch.mamba_track_mask = None


def _starts(pending: Pending, every: int) -> list[int]:
    """Of a kernel that gives back a state behind every `every` tokens of a request: the first of each, and the end."""
    return list(accumulate((n // every for n in pending.extend_lens), initial=0))


def _rows(pending: Pending, chunk: int, every: int, window: int, one_grid: bool) -> list[_Row]:
    """What is pending, by source.

    Kernels give back the state before every chunk of `chunk` tokens, of each request or, with `one_grid`, of the batch;
    or the states behind every `every` tokens of each request. A convolution window of `window` tokens must lie in the
    pass.
    """
    lengths, found = pending.extend_lens, []
    chunks = list(accumulate((-(-n // chunk) for n in lengths), initial=0))
    firsts = _starts(pending, every) if every else []
    for row, checkpoint, offset, at in pending.reached(window):
        if offset == lengths[row]:
            source, first, second = _Source.FINAL, row, 0
        elif every:
            if offset % every:
                continue
            source, first, second = _Source.CHUNK, firsts[row] + offset // every - 1, 0
        elif one_grid:
            source, first, second = (_Source.AGAIN, row, at) if at % chunk else (_Source.CHUNK, at // chunk, 0)
        elif offset % chunk:
            source, first, second = _Source.INSIDE, row, offset
        else:
            source, first, second = _Source.CHUNK, chunks[row] + offset // chunk, 0
        found.append(_Row(source, first, second, row, offset, at, checkpoint))
    return sorted(found, key=lambda row: row.source)


def _by_source(rows: Sequence[_Row]) -> list[slice]:
    """Where the rows of each source stand among `rows`, which are sorted by it."""
    bounds = accumulate((sum(row.source == source for row in rows) for source in _Source), initial=0)
    return [slice(*pair) for pair in pairwise(bounds)]


def _places(rows: Sequence[_Row], device: Any) -> Any:
    """Of each state its request's row, and the tokens of the request and of the batch before it; [3, n] int64."""
    import torch

    places = [[row.request for row in rows], [row.offset for row in rows], [row.at for row in rows]]
    return torch.tensor(places, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _send(rows: Sequence[_Row], window: int, starts: Sequence[int], device: Any) -> tuple[Any, Any]:
    """Send each row's two numbers and its window's tokens, [n, 2 + window], and `starts`; both int64.

    Without waiting for `device`: the stream of the forward pass is behind the previous one, and would wait for that.
    """
    import torch

    numbers = [n for row in rows for n in (row.first, row.second, *range(row.at - window, row.at))]
    size = len(numbers)
    host = torch.tensor([*numbers, *starts], dtype=torch.int64, pin_memory=device.type == "cuda")
    sent = host.to(device, non_blocking=True)
    return sent[:size].view(len(rows), 2 + window), sent[size:]
