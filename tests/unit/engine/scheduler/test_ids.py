"""Ids of requests in a scheduler: each begins with itself only, and travels as any text."""

from __future__ import annotations

import pickle
from array import array
from types import SimpleNamespace

import pytest

from sglang_hybrid.engine.scheduler import ids


def test_an_id_begins_with_itself_only_and_travels_as_text() -> None:
    made = ids.RequestId("b1")
    assert not made.startswith("b")
    assert made.startswith("b1")
    assert {made: 1}["b1"] == 1
    assert type(pickle.loads(pickle.dumps(made))) is str


def test_a_scheduler_without_pickles_sends_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import io_struct

    monkeypatch.setattr(io_struct, "_msgpack_encoder", io_struct._msgpack_encoder)
    ids._encode_ids.cache_clear()
    for pickles in (True, False):
        monkeypatch.setattr(io_struct, "_USE_PICKLE_IPC", pickles)
        req = SimpleNamespace(rid="a")
        ids.name(None, req)
        assert type(req.rid) is ids.RequestId
    ids._encode_ids.cache_clear()
    sent = io_struct.msgpack_decode(io_struct.msgpack_encode(io_struct.AbortReq(rid=req.rid)))
    assert (sent.rid, type(sent.rid)) == ("a", str)
    assert io_struct._msgpack_encoder.encode(array("q", [1])), "what else SGLang's own knows"
    check = SimpleNamespace(rid="HEALTH_CHECK_1")
    ids.name(None, check)
    assert type(check.rid) is str, "known by its prefix"
