"""An entry as bytes, as it goes from one server's memory to another's.

    parcel   form | name | states of all layers | transition rows [layers, heads] | KV [tokens] | transitions [kept]

Everything is as the store keeps it, but for the numbers of transitions: on the way a row says which of the parcel's
own transitions it is, -1 where it vanished. `form` names what bytes mean (`exchange`), `name` the segment, 16 bytes of
each.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.engine.segments.store import Store
from sglang_hybrid.segment.index import Entry
from sglang_hybrid.segment.slabs import Slots

FORM_BYTES = NAME_BYTES = 16
HEAD_BYTES = FORM_BYTES + NAME_BYTES


def name(ids: Sequence[int], namespace: str | None) -> bytes:
    """What a segment of a tenant is known by among servers, however each of them calls its model."""
    about = repr(namespace).encode() + b"\0" + array("q", ids).tobytes()
    return hashlib.blake2b(about, digest_size=NAME_BYTES).digest()


class Parcels:
    """Of the entries in `store`. Whoever packs or unpacks has waited for the passes that use it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        shapes = store.shapes
        heads = shapes.temporal[0] if shapes.dense else 0
        self._rows = (shapes.linear_layers, heads)
        self._cuts = (store.state_bytes, 8 * shapes.linear_layers * heads)

    def size(self, tokens: int, kept: int) -> int:
        """Bytes of an entry with an interior of `tokens` and `kept` transitions."""
        store = self._store
        return HEAD_BYTES + sum(self._cuts) + tokens * store.token_bytes + kept * store.transition_bytes

    def fits(self, data: bytes | bytearray, head: bytes, tokens: int, kept: int) -> bool:
        """Whether `data`, whoever sent it, is an entry of that form and name, with rows of its own transitions only."""
        if kept < 0 or len(data) != self.size(tokens, kept) or data[:HEAD_BYTES] != head:
            return False
        rows = np.frombuffer(data, np.uint8, self._cuts[1], HEAD_BYTES + self._cuts[0]).view(np.int64)
        return not self._store.transitions or bool(((rows >= -1) & (rows < kept)).all())

    def pack(self, entry: Entry, head: bytes) -> Tensor:
        """[size] uint8 on the host; `head` is form and name."""
        store, device = self._store, self._store.buffer.device
        parts = [store.state_data[entry.block]]
        if store.transitions:
            rows = torch.stack([layer.transition_rows[entry.block] for layer in store.layers])  # type: ignore[index]
            parts.append(torch.from_numpy(_ordinals(rows.cpu().numpy(), entry.transitions)).to(device).view(-1))
        parts.append(store.token_data[torch.from_numpy(entry.slots).to(device)])
        parts.append(store.transition_data[torch.from_numpy(entry.transitions).to(device)])
        whole = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts if part.numel()])
        return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), whole.cpu()])

    def unpack(self, data: Tensor, entry: Entry, kept: int) -> None:
        """Write `data`, what `pack` made of another server's entry, into the memory of `entry`, which has all of its
        transitions yet: the first `kept` are written."""
        if data.numel() != self.size(entry.tokens, kept) or kept > entry.transitions.size:
            raise InvariantError(f"a parcel of {entry.tokens} tokens is of another size: {data.numel()}")
        store, device = self._store, self._store.buffer.device
        sizes = (HEAD_BYTES, *self._cuts, entry.tokens * store.token_bytes, kept * store.transition_bytes)
        _, states, rows, kv, transitions = data.to(device).split(sizes)
        store.state_data[entry.block] = states
        if store.transitions:
            slots = torch.from_numpy(entry.transitions).to(device)
            which = rows.clone().view(torch.int64).view(self._rows)
            numbers = torch.where(which < 0, which, slots[which.clamp(min=0)])
            for layer, found in zip(store.layers, numbers, strict=True):
                assert layer.transition_rows is not None
                layer.transition_rows[entry.block] = found
            store.transition_data[slots[:kept]] = transitions.view(kept, -1)
        store.token_data[torch.from_numpy(entry.slots).to(device)] = kv.view(entry.tokens, -1)


def _ordinals(rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]], slots: Slots) -> Slots:
    """Which of `slots` each of `rows` is; -1 where a row is none."""
    if not slots.size:
        return np.full(rows.shape, -1, np.int64)
    order = np.argsort(slots)
    places = np.searchsorted(slots[order], rows).clip(max=slots.size - 1)
    return np.where(rows < 0, -1, order[places]).astype(np.int64)
