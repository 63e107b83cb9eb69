"""Several states out of one prefill: rows added to the index sets with which SGLang saves one.

SGLang's chunked kernels already produce the state at the start of every chunk, and its tracking copies one of them per
request into a slot of the cache. The copy is an indexed assignment, so a second state of the same request is a second
row: no kernel changes, on a CPU or a GPU, with or without the extra buffer. A state inside a chunk is rolled forward
from the chunk's start by `sglang_hybrid_kernels.state_at` (kernels.py). Not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from sglang_hybrid.engine.cache.requests import Checkpoint, tracked


@dataclass
class _Pending:
    """Rows of the batch whose forward pass comes next, and its lengths, by which the pass knows them for its own.

    SGLang copies a ForwardBatch field by field on the way to the backend, so an attribute of ours would be lost.
    """

    rows: list[tuple[int, Checkpoint]]
    prefix_lens: list[int]
    extend_lens: list[int]


_pending: _Pending | None = None
_inside: tuple[Any, Any, Any] | None = None


def inside_chunks() -> tuple[Any, Any, Any] | None:
    """States of the running pass that lie inside a chunk: sequences, positions in them, slots; each [n] int64."""
    return _inside


def step_tokens(model_runner: Any, inside: bool = False) -> int:
    """Tokens between the states that a pass of this model can give back; 0 where only SGLang's own one is possible.

    `inside`: our kernel gives those inside a chunk too.
    """
    backend = getattr(getattr(model_runner, "attn_backend", None), "linear_attn_backend", None)
    kind = type(backend).__name__
    if kind == "Mamba2AttnBackend":
        # Before 0.5.21 its states lie on a grid that several requests in one pass do not share.
        fields = getattr(_metadata_type(), "__dataclass_fields__", {})
        return chunk_tokens(backend) if "track_ssm_recompute_dst" in fields else 0
    if kind != "GDNAttnBackend":
        return 0
    if getattr(backend.kernel_dispatcher, "extend_uses_state_checkpoints", False):
        return 0  # FlashInfer plans its snapshots by itself
    return 1 if inside else chunk_tokens(backend)


def chunk_tokens(backend: Any) -> int:
    """Tokens per chunk of a backend's prefill kernel; GDN's is 64, and 0.5.17 says so nowhere."""
    return int(getattr(backend, "mamba_chunk_size", 64))


def _metadata_type() -> Any:
    from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata

    return ForwardMetadata


def carry(_: Any, __: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of ForwardBatch.init_new: remember which row of the coming pass saves what."""
    global _pending
    _pending = None
    if not batch.forward_mode.is_extend() or batch.forward_mode.is_mixed():
        return
    rows = [(row, c) for row, req in enumerate(batch.reqs) for c in tracked(req).planned if c.slot is not None]
    if rows:
        _pending = _Pending(rows, list(batch.prefix_lens), list(batch.extend_lens))


@dataclass
class _Sources:
    """Where the pass leaves each state that is wanted: pairs of a source and the slot it goes to."""

    finals: list[tuple[int, int]] = field(default_factory=list)  # the state behind the last token of a row
    chunks: list[tuple[int, int]] = field(default_factory=list)  # the state before a chunk of the prefill
    inside: list[tuple[int, int, int]] = field(default_factory=list)  # (row, offset in it): computed from its chunk
    again: list[tuple[int, int, int]] = field(default_factory=list)  # (row, end): Mamba-2 computes the chunk again
    windows: list[list[int]] = field(default_factory=list)  # tokens of each convolution window
    checkpoints: list[Checkpoint] = field(default_factory=list)


def _sources(pending: _Pending, chunk: int, window: int, plain: bool) -> _Sources:
    """Sort what is pending by where it comes from; `plain` backends cut every row into chunks of its own."""
    found, lengths = _Sources(), pending.extend_lens
    starts = list(accumulate(lengths, initial=0))
    chunks = list(accumulate((-(-n // chunk) for n in lengths), initial=0))
    for row, checkpoint in pending.rows:
        offset = checkpoint.position - pending.prefix_lens[row]
        if checkpoint.slot is None or not window <= offset <= lengths[row]:
            continue
        slot, at = int(checkpoint.slot), starts[row] + offset
        if offset == lengths[row]:
            found.finals.append((row, slot))
        elif plain and offset % chunk:
            found.inside.append((row, offset, slot))
        elif not plain and at % chunk:
            found.again.append((row, at, slot))
        else:
            found.chunks.append((chunks[row] + offset // chunk if plain else at // chunk, slot))
        found.windows.append(list(range(at - window, at)))
        found.checkpoints.append(checkpoint)
    return found


def extend(metadata: Any, backend: Any, forward_batch: Any) -> None:
    """AFTER hook of MambaAttnBackendBase._forward_metadata: add the rows."""
    global _inside, _pending
    pending, _pending, _inside = _pending, None, None
    if pending is None or metadata.query_start_loc is None or not forward_batch.forward_mode.is_extend():
        return
    passed = list(forward_batch.extend_prefix_lens_cpu or ()), list(forward_batch.extend_seq_lens_cpu or ())
    if passed != (pending.prefix_lens, pending.extend_lens):
        return
    import torch

    device = metadata.query_start_loc.device
    plain = type(backend).__name__ != "Mamba2AttnBackend"
    found = _sources(pending, chunk_tokens(backend), backend.conv_states_shape[-1], plain)
    if not found.checkpoints:
        return

    def column(rows: Sequence[Sequence[int]], at: int) -> Any:
        return torch.tensor([row[at] for row in rows], dtype=torch.int64, device=device)

    def slots(rows: Sequence[Sequence[int]]) -> Any:
        return backend._translate_mamba_indices(column(rows, -1)) if rows else column(rows, -1)

    def add(name: str, values: Any) -> None:
        held = getattr(metadata, name, None)
        setattr(metadata, name, values if held is None else torch.cat([held, values.to(held.dtype)]))

    add("track_conv_indices", torch.tensor(found.windows, dtype=torch.int64, device=device))
    add("track_ssm_h_src", column(found.chunks, 0))
    add("track_ssm_h_dst", slots(found.chunks))
    add("track_ssm_final_src", metadata.mamba_cache_indices[column(found.finals, 0)].long())
    add("track_ssm_final_dst", slots(found.finals))
    if not plain:
        add("track_ssm_seq_idx", column(found.again, 0))
        add("track_ssm_end_locs", column(found.again, 1))
        add("track_ssm_recompute_dst", slots(found.again))
    if found.inside:
        _inside = (column(found.inside, 0), column(found.inside, 1), slots(found.inside))
    _add_destinations(
        metadata, forward_batch, slots([(int(c.slot),) for c in found.checkpoints]), len(pending.extend_lens)
    )
    for checkpoint in found.checkpoints:
        checkpoint.written = True


def _add_destinations(metadata: Any, forward_batch: Any, slots: Any, size: int) -> None:
    """Where the convolution windows go: rows behind those of the requests, which SGLang selects by its mask."""
    import torch

    device = slots.device
    mask, held = forward_batch.mamba_track_mask, forward_batch.mamba_track_indices
    if mask is None or held is None:
        mask = torch.zeros(size, dtype=torch.bool, device=device)
        held = torch.zeros(size, dtype=torch.int64, device=device)
    forward_batch.mamba_track_mask = torch.cat([mask, torch.ones(len(slots), dtype=torch.bool, device=device)])
    forward_batch.mamba_track_indices = torch.cat([held, slots.to(held.dtype)])
    added = torch.arange(len(mask), len(mask) + len(slots), device=device)
    chosen = getattr(metadata, "mamba_track_mask_indices", None)
    if chosen is None:
        chosen = mask.nonzero(as_tuple=True)[0]
    metadata.mamba_track_mask_indices = torch.cat([chosen, added.to(chosen.dtype)])
    metadata.mamba_track_indices = forward_batch.mamba_track_indices
    metadata.has_mamba_track_mask = True
