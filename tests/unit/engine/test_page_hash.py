"""Names of pages, against those of SGLang's compiled module and of the router's index."""

from __future__ import annotations

import random
from array import array
from hashlib import sha256

import pytest

from sglang_hybrid.routing.index import block_hashes

pytest.importorskip("sglang")

from sglang_hybrid.engine.cache.page_hash import get_hash


def naive(units: list[tuple[int, ...]], before: bytes, page: int | None) -> str | list[str]:
    names, digest = [], before
    for start in range(0, len(units), page or max(1, len(units))):
        part = units[start : start + (page or len(units))]
        digest = sha256(digest + b"".join(t.to_bytes(4, "little") for unit in part for t in unit)).digest()
        names.append(digest.hex())
    return names if page else (names or [sha256(before).hexdigest()])[0]


@pytest.mark.parametrize("code", "IqQL")
@pytest.mark.parametrize("page", [None, 1, 3, 64])
@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 200])
def test_every_shape_of_tokens(code: str, page: int | None, bigram: bool, count: int) -> None:
    rng = random.Random(count)
    tokens = [rng.choice([0, 5, 2**31, 2**32 - 1, rng.randrange(2**17)]) for _ in range(count + bigram)]
    raw = array(code, [*tokens, 7] if count else tokens)
    units = [(tokens[at], tokens[at + 1]) if bigram else (tokens[at],) for at in range(count)]
    for before in (None, sha256(b"x").digest()):
        assert get_hash(raw, count, 1 + bigram, bigram, before, page) == naive(units, before or b"", page)


def test_units_of_several_tokens() -> None:
    raw = array("I", range(30))
    units = [(at, at + 1, at + 2) for at in range(0, 30, 3)]
    assert get_hash(raw, 10, 3, False, None, 4) == naive(units, b"", 4)


def test_they_are_the_names_that_routers_know() -> None:
    tokens = [random.Random(1).randrange(2**17) for _ in range(300)]
    names = get_hash(array("q", tokens), 256, 1, False, None, 64)
    assert [int.from_bytes(bytes.fromhex(name)[:8], "big", signed=True) for name in names] == block_hashes(tokens, 64)


def test_sglangs_own_module_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it can be built; ours takes its place in servers only."""
    from sglang.srt.mem_cache.cpp_utils import native_hash

    original = getattr(native_hash._load_native_hash_module, "__wrapped__", None)
    try:
        module = original() if original else native_hash._load_native_hash_module()
    except RuntimeError as error:
        pytest.skip(f"SGLang's module is not built here: {error}")
    rng = random.Random(2)
    for _ in range(50):
        count, bigram = rng.randrange(200), rng.random() < 0.3
        raw = array(rng.choice("IqQ"), [rng.randrange(2**32) for _ in range(count + 1)])
        before, page = rng.choice([None, sha256(b"y").digest()]), rng.choice([None, 1, 16, 64])
        asked = (raw, count, 1 + bigram, bigram, before, page)
        assert get_hash(*asked) == module.get_hash(*asked)


@pytest.mark.parametrize(
    ("raw", "count", "before", "page", "error"),
    [
        (array("q", [1, 2]), 3, None, 1, ValueError),
        (array("q", [1, 2]), 2, b"short", 1, ValueError),
        (array("q", [1, 2]), 2, None, 0, ValueError),
        (array("q", [1, -2]), 2, None, 1, IndexError),
        (array("q", [1, 2**32]), 2, None, None, IndexError),
    ],
)
def test_what_has_no_name(
    raw: array[int], count: int, before: bytes | None, page: int | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        get_hash(raw, count, 1, False, before, page)
