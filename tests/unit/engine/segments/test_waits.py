"""A composed pass does not make the host wait for its device: a batch before it may still run there.

Tensors on torch's meta device have no values, so that reading one fails as a wait does here; what is copied there from
ordinary memory, for which CUDA waits too, is refused by `NoCopies`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.requests import Checkpoint, tracked
from sglang_hybrid.engine.pools import copies
from sglang_hybrid.engine.segments import forward
from sglang_hybrid.engine.segments.attention import AttentionPass
from sglang_hybrid.engine.segments.composer import Composer
from sglang_hybrid.engine.segments.draft import build
from sglang_hybrid.engine.segments.linear import LinearPass
from sglang_hybrid.engine.segments.store import Planes
from sglang_hybrid.segment.blocks import Blocks
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.segment.index import Costs, SegmentIndex
from sglang_hybrid.segment.keys import Identity
from sglang_hybrid.segment.passes import Pass
from sglang_hybrid.segment.prompt import Limits, SegmentedPrompt
from sglang_hybrid.segment.slabs import Cut

SMALL = ModelSpec("toy", kv_bytes_per_token=512, checkpoint_bytes=58_368, flops_per_token=1e6, flops_per_token_pair=10)
DEVICE, WINDOW, TOKENS, PLAIN = torch.device("meta"), 3, 400, 70


class NoCopies(TorchDispatchMode):
    """Fails where a tensor of the host is copied to the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            given = args[-1 if func is torch.ops.aten.copy_.default else 0]
            assert given.device == result.device, "a copy from ordinary memory waits"
        return result


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What goes to the device from pinned memory, the only way that does not wait."""

    def send(ids: np.ndarray, to: torch.device) -> torch.Tensor:
        assert (ids.ndim, ids.dtype, to) == (1, np.int64, DEVICE)
        return torch.empty(len(ids), dtype=torch.int64, device=to)

    monkeypatch.setattr(copies, "send", send)
    monkeypatch.setattr(compat, "plan_locations", lambda *_: None)
    with NoCopies():
        yield


def composed() -> tuple[Any, Pass]:
    """A request of SGLang's and its pass, which makes a segment and jumps over it."""
    index = SegmentIndex(Blocks(400, Cut(100)), Costs(SMALL, 1000, 10))
    prompt = SegmentedPrompt(array("q", range(TOKENS)), ((100, 250),), Seams(8, WINDOW), Identity("test", 8, 8))
    assert prompt.begin(0, TOKENS, Limits(10_000, 10_000), index, 0.0) is not None
    made = prompt.commit(index)
    slot = torch.empty((), dtype=torch.int64, device=DEVICE)
    kv = SimpleNamespace(mamba_pool_idx=slot, req_pool_idx=1)
    req = SimpleNamespace(kv=kv, full_untruncated_fill_ids=prompt.ids)
    record = tracked(req)
    record.composed = made
    record.planned = [Checkpoint(at, at, slot.view(1)) for at in (64, 300, TOKENS)]
    return req, made


def batch_of(*requests: Any) -> Any:
    """Built as `forward.shorten` builds it: plain requests of PLAIN tokens, and composed ones."""
    found = Composer.composed(None, SimpleNamespace(reqs=requests))  # type: ignore[arg-type]
    lengths = [PLAIN if tracked(req).composed is None else TOKENS for req in requests]
    return build([0] * len(lengths), lengths, found, 4096, WINDOW, DEVICE)


def test_its_numbers_are_sent_without_a_wait() -> None:
    batch = batch_of(SimpleNamespace(), composed()[0])
    assert batch.linear.states.shape == (2,), "of the request, and of the segment that is made"
    assert batch.linear.states.device == batch.saves.finals.device == DEVICE
    assert batch.plain_rows == [0]


def test_its_attention_and_linear_layers_are_planned_without_a_wait() -> None:
    batch = batch_of(composed()[0])
    slots = torch.empty(TOKENS, dtype=torch.int64, device=DEVICE)
    table = torch.empty(4, 4096, dtype=torch.int32, device=DEVICE)
    turns = torch.empty(8, dtype=torch.float64, device=DEVICE)
    for frequencies in ((turns, False), None):
        AttentionPass(batch, Planes([], []), None, [3], slots, table, frequencies)
    made = LinearPass(batch, None, DEVICE, None)
    x = torch.empty(len(batch.linear.tokens), 2, device=DEVICE)
    assert made.chunks.joined(made.chunks.cut(x)).shape == x.shape


def test_plain_requests_beside_it_are_planned_without_a_wait() -> None:
    batch = batch_of(composed()[0], SimpleNamespace(), SimpleNamespace())
    tokens = sum(batch.lengths)
    by_request = torch.empty(3, dtype=torch.int32, device=DEVICE)
    given = SimpleNamespace(seq_lens=by_request, extend_seq_lens=by_request, rids=[*"abc"])
    given.seq_lens_cpu = torch.tensor([TOKENS, PLAIN, PLAIN])
    for name in ("input_ids", "positions", "out_cache_loc"):
        setattr(given, name, torch.empty(tokens, dtype=torch.int64, device=DEVICE))
    found = forward.plain(given, batch, None)
    assert (found.rids, found.seq_lens_sum, found.seq_lens.shape) == ([*"bc"], 2 * PLAIN, (2,))


def test_waits_are_seen() -> None:
    value = torch.empty(1, dtype=torch.int64, device=DEVICE)
    waits: list[tuple[type[Exception], Callable[[], Any]]] = [
        (RuntimeError, value.item),
        (AssertionError, lambda: torch.tensor([1]).to(DEVICE)),
        (AssertionError, lambda: value.copy_(torch.tensor([1]))),
    ]
    for error, wait in waits:
        with pytest.raises(error):
            wait()
