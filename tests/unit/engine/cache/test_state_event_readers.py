"""Readers of SGLang's events that know nothing of states: every event of ours decodes as one of theirs."""

from __future__ import annotations

import warnings
from typing import Any

import msgspec
import pytest

pytest.importorskip("sglang")

from sglang_hybrid.engine import compat
from sglang_hybrid.routing.index import STATE_KIND

if not compat.at_least("0.5.21"):
    pytest.skip("events of states are refused with this SGLang", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns about absent accelerators
    from sglang.srt.disaggregation import kv_events

    from sglang_hybrid.engine.cache import state_events


def told() -> list[Any]:
    return [state_events._Stored(block_hashes=[-5]), state_events._Removed(block_hashes=[7])]


def test_sglangs_own_reader_takes_them_among_its_own() -> None:
    theirs = kv_events.BlockStored(
        block_hashes=[1, 2], parent_block_hash=None, token_ids=[3] * 128, block_size=64, lora_id=None
    )
    batch = [0.5, [theirs, *told(), kv_events.AllBlocksCleared()], 0]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=kv_events.KVEventBatch)
    assert [type(event).__name__ for event in read.events] == [
        "BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared",
    ]  # fmt: skip
    stored: Any = read.events[1]
    assert (stored.block_hashes, stored.token_ids, stored.block_size, stored.medium) == ([-5], [], 0, "GPU")


def test_every_required_field_is_there_and_the_kind_is_said() -> None:
    for event, theirs in zip(told(), (kv_events.BlockStored, kv_events.BlockRemoved), strict=True):
        raw = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
        required = {field.encode_name for field in msgspec.structs.fields(theirs) if field.required}
        assert required <= set(raw)
        assert (raw["kv_cache_spec_kind"], raw["group_idx"]) == (STATE_KIND, state_events.GROUP)
