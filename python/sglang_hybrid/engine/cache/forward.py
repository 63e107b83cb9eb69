"""Several states out of one prefill: rows added to the index sets with which SGLang saves one.

SGLang's chunked kernels already produce the state at the start of every chunk, and its tracking copies one of them per
request into a slot of the cache. The copy is an indexed assignment, so a second state of the same request is a second
row: no kernel changes, on a CPU or a GPU, with or without the extra buffer. A state inside a chunk is rolled forward
from the chunk's start by `sglang_hybrid_kernels.state_at` (kernels.py). Not run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def extend(metadata: Any, backend: Any, forward_batch: Any) -> None:
    """AFTER hook of MambaAttnBackendBase._forward_metadata: add the rows."""
    global _inside, _pending
    pending, _pending, _inside = _pending, None, None
    if pending is None or metadata.query_start_loc is None or not forward_batch.forward_mode.is_extend():
        return
    lengths = list(forward_batch.extend_seq_lens_cpu or ())
    prefixes = list(forward_batch.extend_prefix_lens_cpu or ())
    if (prefixes, lengths) != (pending.prefix_lens, pending.extend_lens):
        return
    rows = pending.rows
    import torch

    device = metadata.query_start_loc.device
    starts = list(accumulate(lengths, initial=0))
    chunk = chunk_tokens(backend)
    chunks = list(accumulate((-(-n // chunk) for n in lengths), initial=0))
    window = backend.conv_states_shape[-1]
    plain = type(backend).__name__ != "Mamba2AttnBackend"
    h_src, h_dst, final_src, final_dst, again_seq, again_end, again_dst = ([] for _ in range(7))
    conv, slots, written, inside = [], [], [], []
    for row, checkpoint in rows:
        offset = checkpoint.position - prefixes[row]
        if checkpoint.slot is None or not window <= offset <= lengths[row]:
            continue
        slot, at = int(checkpoint.slot), starts[row] + offset
        if offset == lengths[row]:
            final_src.append(row)
            final_dst.append(slot)
        elif plain and offset % chunk:
            inside.append((row, offset, slot))
        elif plain:
            h_src.append(chunks[row] + offset // chunk)
            h_dst.append(slot)
        elif at % chunk:
            again_seq.append(row)
            again_end.append(at)
            again_dst.append(slot)
        else:
            h_src.append(at // chunk)
            h_dst.append(slot)
        conv.append(range(at - window, at))
        slots.append(slot)
        written.append(checkpoint)
    if not written:
        return

    def whole(values: Any) -> Any:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    def physical(values: list[int]) -> Any:
        return backend._translate_mamba_indices(whole(values)) if values else whole(values)

    def add(name: str, values: Any) -> None:
        held = getattr(metadata, name, None)
        setattr(metadata, name, values if held is None else torch.cat([held, values.to(held.dtype)]))

    add("track_conv_indices", torch.tensor([list(r) for r in conv], dtype=torch.int64, device=device))
    add("track_ssm_h_src", whole(h_src))
    add("track_ssm_h_dst", physical(h_dst))
    add("track_ssm_final_src", metadata.mamba_cache_indices[whole(final_src)].long())
    add("track_ssm_final_dst", physical(final_dst))
    if not plain:
        add("track_ssm_seq_idx", whole(again_seq))
        add("track_ssm_end_locs", whole(again_end))
        add("track_ssm_recompute_dst", physical(again_dst))
    if inside:
        rows_inside, offsets, destinations = map(list, zip(*inside, strict=True))
        _inside = (whole(rows_inside), whole(offsets), physical(destinations))
    _add_destinations(metadata, forward_batch, physical(slots), len(lengths))
    for checkpoint in written:
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
