"""Where a prompt could resume on every worker, from events that may be late, doubled, lost or damaged."""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.routing.index import STATE_KIND, Reach, RestartIndex, block_hashes

PAGE = 4


def naive(tokens: list[int], page: int, start: bytes = b"") -> list[int]:
    """SGLang's chain, written down page by page."""
    names, digest = [], start
    for at in range(0, len(tokens) // page * page, page):
        digest = sha256(digest + b"".join(struct.pack("<I", token) for token in tokens[at : at + page])).digest()
        names.append(struct.unpack(">q", digest[:8])[0])
    return names


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 9))
def test_names_of_pages_are_sglangs(tokens: list[int], page: int) -> None:
    assert block_hashes(tokens, page) == naive(tokens, page)
    salted = naive(tokens, page, sha256(b"sglang-cache-salt-v1\0tenant").digest())
    assert block_hashes(tokens, page, "tenant") == salted


def stored(names: list[int], state: bool = False, medium: str = "GPU", kind: str = "BlockStored") -> dict[str, Any]:
    more = {"kv_cache_spec_kind": STATE_KIND, "group_idx": 1} if state else {}
    return {"type": kind, "block_hashes": names, "medium": medium, **more}


def removed(names: list[int], state: bool = False, medium: str = "GPU") -> dict[str, Any]:
    return stored(names, state, medium, "BlockRemoved")


def test_a_prompt_resumes_at_the_deepest_state_with_all_its_blocks() -> None:
    index, prompt = RestartIndex(PAGE), list(range(100, 121))
    names = block_hashes(prompt, PAGE)
    for event in (stored(names[:4]), stored(names[1:2], state=True), stored(names[4:5], state=True)):
        assert index.apply("a", event)
    index.join("b")
    assert index.reaches(prompt) == {"a": Reach(8, 16), "b": Reach(0, 0)}
    index.apply("a", stored(names[4:]))
    assert index.reaches(prompt)["a"] == Reach(20, 20)
    assert index.reaches(prompt[:20])["a"] == Reach(8, 16), "the last token of a prompt is computed"
    index.apply("a", removed(names[4:5], state=True))
    assert index.reaches(prompt)["a"] == Reach(8, 20)
    index.apply("a", removed(names[:1]))
    assert index.reaches(prompt)["a"] == Reach(0, 0)
    assert index.reaches(prompt, "tenant")["a"] == Reach(0, 0)


def test_what_leaves_the_device_may_still_be_in_host_memory() -> None:
    index, prompt = RestartIndex(PAGE), list(range(9))
    names = block_hashes(prompt, PAGE)
    for medium in ("GPU", "CPU_PINNED"):
        index.apply("a", stored(names, medium=medium))
        index.apply("a", stored(names[1:], state=True, medium=medium))
    index.apply("a", removed(names))
    index.apply("a", removed(names[1:], state=True))
    assert index.reaches(prompt)["a"] == Reach(8, 8)
    index.apply("a", {"type": "AllBlocksCleared"})
    assert index.reaches(prompt)["a"] == Reach(0, 0)
    index.leave("a")
    index.leave("nobody")
    assert index.workers == ()
    assert index.reaches(prompt) == {}


@given(
    st.dictionaries(
        st.sampled_from(["type", "block_hashes", "medium", "kv_cache_spec_kind", "x"]),
        st.none()
        | st.sampled_from(["BlockStored", "BlockRemoved", "BlockMoved", "mamba"])
        | st.integers()
        | st.lists(st.text()),
    )
)
def test_damaged_events_change_nothing(event: dict[str, Any]) -> None:
    index, prompt = RestartIndex(PAGE), list(range(9))
    names = block_hashes(prompt, PAGE)
    index.apply("a", stored(names))
    index.apply("a", stored(names, state=True))
    known = index.apply("a", event)
    assert known is (event.get("type") in ("BlockStored", "BlockRemoved") and event.get("block_hashes") == [])
    assert index.reaches(prompt)["a"] == Reach(8, 8)


def test_doubled_events_count_once_and_pages_have_tokens() -> None:
    index, prompt = RestartIndex(PAGE), list(range(9))
    names = block_hashes(prompt, PAGE)
    for _ in range(3):
        index.apply("a", stored(names))
    index.apply("a", removed(names))
    assert index.reaches(prompt)["a"] == Reach(0, 0)
    for page in (0, -1):
        with pytest.raises(ConfigError, match="one token or more"):
            RestartIndex(page)
        with pytest.raises(ConfigError, match="one token or more"):
            block_hashes(np.zeros(3, np.int32), page)


@given(st.data())
def test_workers_and_media_together_are_each_by_itself(data: st.DataObject) -> None:
    prompt = list(range(4 * PAGE + 1))
    names = block_hashes(prompt, PAGE)
    workers, media = ["a", "b", "c"], ["GPU", "CPU_PINNED"]
    index = RestartIndex(PAGE)
    held: dict[tuple[str, str, bool], set[int]] = {}
    known: set[str] = set()
    for _ in range(data.draw(st.integers(0, 40))):
        worker = data.draw(st.sampled_from(workers))
        if data.draw(st.integers(0, 9)) == 0:
            known.discard(worker)
            held = {key: value for key, value in held.items() if key[0] != worker}
            index.leave(worker)
            continue
        known.add(worker)
        medium, state = data.draw(st.sampled_from(media)), data.draw(st.booleans())
        some = data.draw(st.lists(st.sampled_from(names), max_size=4))
        has = held.setdefault((worker, medium, state), set())
        if data.draw(st.integers(0, 3)):
            index.apply(worker, stored(some, state, medium))
            has.update(some)
        else:
            index.apply(worker, removed(some, state, medium))
            has.difference_update(some)
    expected = {}
    for worker in known:
        kv = resume = 0
        for name in names:
            if not any(name in held.get((worker, medium, False), ()) for medium in media):
                break
            kv += PAGE
            if any(name in held.get((worker, medium, True), ()) for medium in media):
                resume = kv
        expected[worker] = Reach(resume, kv)
    assert index.reaches(prompt) == expected
