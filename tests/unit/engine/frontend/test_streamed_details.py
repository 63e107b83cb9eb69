"""What an answer in many chunks says of the cache: sent twice by the scheduler, in every chunk of the HTTP process."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.cache.hooks import details
from sglang_hybrid.engine.cache.requests import tracked
from sglang_hybrid.engine.frontend.reporting.usage import Cached, anthropic, carry

STOCK = {"device": 8, "host": 0}


def request(saved: int = 64) -> Any:
    req: Any = SimpleNamespace(ended=False)
    req.finished = lambda: req.ended
    record: Any = tracked(req)
    record.misses, record.saved_tokens = {"never_seen": 92}, saved
    record.request = SimpleNamespace(prompt_tokens=100, cached_tokens=8)
    return req


def outputs(*said: dict[str, Any] | None, rids: tuple[str, ...] = ("a",)) -> Any:
    return SimpleNamespace(rids=list(rids), cached_tokens=[8] * len(said), cached_tokens_details=list(said))


def explanations(batch: Any) -> list[tuple[dict[str, int], int]]:
    return [(dict(count.misses), count.written) for count in batch.cached_tokens if isinstance(count, Cached)]


def test_the_scheduler_explains_the_first_and_the_last_output() -> None:
    req = request()
    assert details(dict(STOCK), None, req) == {**STOCK, "miss_never_seen": 92, "written": 56}
    assert details(dict(STOCK), None, req) == STOCK
    assert details(None, None, req) is None
    tracked(req).saved_tokens, req.ended = 100, True
    assert details(dict(STOCK), None, req) == {**STOCK, "miss_never_seen": 92, "written": 92}


def test_every_chunk_has_what_the_first_said() -> None:
    manager, req = SimpleNamespace(rid_to_state={"a": SimpleNamespace(), "b": SimpleNamespace()}), request()
    first = outputs(details(dict(STOCK), None, req))
    carry(manager, first)
    between = outputs(dict(STOCK), dict(STOCK), rids=("b", "a"))
    carry(manager, between)
    assert explanations(between) == explanations(first) == [({"never_seen": 92}, 56)]
    assert [type(count) for count in between.cached_tokens] == [int, Cached], "nobody said anything of b"
    assert between.cached_tokens_details == [STOCK, {**STOCK, "miss_never_seen": 92, "written": 56}]
    assert isinstance(between.cached_tokens_details[1]["device"], Cached), "what streams to sglext is this count alone"
    tracked(req).saved_tokens, req.ended = 100, True
    last = outputs(details(dict(STOCK), None, req))
    carry(manager, last)
    assert explanations(last) == [({"never_seen": 92}, 92)]


def test_outputs_of_requests_that_are_gone_and_of_caches_without_reasons_pass() -> None:
    manager: Any = SimpleNamespace(rid_to_state={})
    gone = outputs({**STOCK, "miss_never_seen": 92, "written": 56})
    carry(manager, gone)
    assert explanations(gone) == [({"never_seen": 92}, 56)]
    later = outputs(None)
    carry(manager, later)
    assert (later.cached_tokens, later.cached_tokens_details) == ([8], [None])
    carry(manager, SimpleNamespace(rids=["a"]))


def test_a_dump_of_requests_needs_nothing_of_ours() -> None:
    """SGLang writes answers to its crash dumps, which are read where this package is not."""
    batch = outputs({**STOCK, "miss_never_seen": 92, "written": 56})
    carry(SimpleNamespace(rid_to_state={}), batch)
    dumped = pickle.dumps((batch.cached_tokens, batch.cached_tokens_details))
    assert b"sglang_hybrid" not in dumped
    assert pickle.loads(dumped) == ([8], [{**STOCK, "miss_never_seen": 92, "written": 56}])


@pytest.mark.parametrize(
    ("details", "told"),
    [
        ({}, (10, 0, 0)),
        ({"cached_tokens": 6}, (4, 6, 0)),
        ({"cache_write_tokens": 8}, (2, 0, 8)),
        ({"cached_tokens": 2, "cache_write_tokens": 5, "segment_tokens": 3}, (3, 5, 2)),
        (None, (10, None, None)),
    ],
)
def test_counts_of_messages_are_numbers_that_add_up(details: Any, told: Any) -> None:
    """Clients add up what Anthropic's package calls a number."""
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicUsage

    read = (details or {}).get("cached_tokens")
    result = AnthropicUsage(input_tokens=10 - (read or 0), output_tokens=1, cache_read_input_tokens=read)
    said = SimpleNamespace(prompt_tokens_details=None if details is None else SimpleNamespace(**details))
    got = anthropic(result, said)
    assert (got.input_tokens, got.cache_read_input_tokens, got.cache_creation_input_tokens) == told
