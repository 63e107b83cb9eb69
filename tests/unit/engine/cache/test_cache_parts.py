"""Parts of the cache that need no SGLang: boundaries, summaries, usage, the settings."""

from array import array
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache import boundaries
from sglang_hybrid.engine.cache.coordinator import CacheCoordinator
from sglang_hybrid.engine.cache.metrics import Account, summary
from sglang_hybrid.engine.cache.requests import ids, namespace, streams, tracked


@pytest.mark.parametrize("custom", [None, {}, {"other": 1}])
def test_most_requests_name_no_boundary(custom: object) -> None:
    assert boundaries.named(custom, 100) == ()


def test_named_boundaries_are_sorted_and_distinct() -> None:
    assert boundaries.named({"cache_boundaries": [90, 10, 90, 100]}, 100) == (10, 90, 100)


@pytest.mark.parametrize("bad", [[0], [101], [-1], ["10"], [1.5], [True], 7, "10", list(range(1, 34))])
def test_other_boundaries_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match="cache_boundaries"):
        boundaries.named({"cache_boundaries": bad}, 100)


def test_the_last_message_ends_before_the_opening_of_the_answer() -> None:
    tokens, ends = np.array([1, 2, 9, 3, 8, 4, 9, 5, 6]), np.array([9, 8], np.int64)
    assert boundaries.last_message(tokens, ends) == (7,)
    assert boundaries.last_message(tokens[:7], ends) == (), "nothing follows it"
    assert boundaries.last_message(tokens[:6], ends) == (5,)
    assert boundaries.last_message(tokens[:2], ends) == ()
    assert boundaries.last_message(tokens, np.array([], np.int64)) == ()


def test_the_first_message_ends_behind_its_last_token() -> None:
    tokens, ends = np.array([5, 6, 2, 7, 8, 2, 9]), np.array([2])
    assert boundaries.first_message(tokens, ends) == (3,)
    assert boundaries.first_message(tokens[:3], ends) == (), "nothing follows it"
    assert boundaries.first_message(tokens, np.array([], np.int64)) == ()
    assert boundaries.first_message(np.array([1, 1]), ends) == ()


def test_the_summary_names_reasons_by_size() -> None:
    counts = Counter(requests=3, prompt_tokens=1000, hit_tokens=400, miss_never_seen=350, miss_state_evicted=250)
    line = summary(counts, 7, 16)
    assert "3 requests, 1,000 prompt tokens, hit 40.0 %" in line
    assert "never_seen 35.0 %, state_evicted 25.0 %" in line
    assert "states 7/16" in line
    assert "missed: nothing" in summary(Counter(), 0, 16)


def test_a_summary_comes_once_per_interval_and_tells_what_is_new(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    states = SimpleNamespace(size=16, available_size=lambda: 12)
    account = Account(states, log_interval_s=10.0)
    for at_s in (100.0, 105.0):
        account.request(10, 4, {"never_seen": 6}, at_s)
    assert caplog.messages == []
    for at_s in (111.0, 112.0, 122.0):
        account.request(10, 4, {"never_seen": 6}, at_s)
    assert ["3 requests" in caplog.messages[0], "2 requests" in caplog.messages[1]] == [True, True]
    assert "hit 40.0 % (missed: never_seen 60.0 %); states 4/16" in caplog.messages[1]
    silent = Account(states)
    silent.request(10, 4, {"never_seen": 6}, 500.0)
    assert (silent.counts["requests"], len(caplog.messages)) == (1, 2)


def test_misses_and_events_are_told_where_somebody_listens() -> None:
    heard: list[tuple[str, int]] = []
    account = Account(
        SimpleNamespace(),
        on_miss=lambda *miss: heard.append(miss),
        on_event=lambda *event: heard.append(event),
    )
    account.request(10, 4, {"never_seen": 5, "refused": 1}, 0.0)
    account.request(8, 8, {}, 1.0)
    account.event("written", 3)
    account.event("reclaimed", 0)
    account.planned()
    assert heard == [("never_seen", 5), ("refused", 1), ("written", 3), ("planned", 1)]
    assert account.counts == Counter(
        requests=2, prompt_tokens=18, hit_tokens=12, miss_never_seen=5, miss_refused=1, written=3, planned=1
    )


def test_requests_are_kept_apart_by_key_and_salt() -> None:
    plain, keyed = SimpleNamespace(), SimpleNamespace(extra_key="a", cache_salt=None)
    salted = SimpleNamespace(extra_key=None, cache_salt="a")
    assert namespace(plain) is None
    assert len({namespace(plain), namespace(keyed), namespace(salted)}) == 3
    assert tracked(plain) is tracked(plain)
    assert tracked(plain) is not tracked(keyed)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("admission", "all"),
        ("backend", "fifo"),
        ("memory_idle_s", -0.5),
        ("request_log_mb", 0.0),
        ("request_log_tokens", "some"),
        ("log_interval_s", -1.0),
    ],
)
def test_bad_settings_are_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        HybridConfig.from_mapping({setting: value})


def test_token_ids_are_copied_and_cut_to_30_bits() -> None:
    values = array("q", [1, 2**30 + 5, 2**62 + 7])
    found = ids(values)
    values.append(8)  # would raise while somebody looks into the array
    assert found.tolist() == [1, 5, 7]
    assert found.dtype == np.int32
    assert ids([3, 2**30]).tolist() == [3, 0]
    assert ids(array("q")).size == ids([]).size == 0


def test_only_a_streaming_session_keeps_what_its_turns_hold() -> None:
    for plain in (
        SimpleNamespace(),
        SimpleNamespace(session=None),
        SimpleNamespace(session=SimpleNamespace(streaming=0)),
    ):
        assert not streams(plain)
    assert streams(SimpleNamespace(session=SimpleNamespace(streaming=True)))


@pytest.mark.parametrize(
    ("grid", "size", "found"),
    [(1, 200, (10, 190)), (64, 191, (10,)), (64, 200, (10, 190)), (128, 200, (10,)), (256, 300, (10, 190))],
)
def test_the_last_message_is_kept_where_the_prompts_end_is_saved_behind_it(
    grid: int, size: int, found: tuple[int, ...]
) -> None:
    """The opening of an answer may not come again: templates put `<think>` into it, and leave it out later."""
    tokens = np.ones(size, np.int32)
    tokens[[9, 189]] = 2
    req = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None))
    cache = SimpleNamespace(grid=grid, _message_ends=[2])
    assert CacheCoordinator._boundaries(cache, req, tokens) == found
