"""Names of pages, against those of SGLang's compiled module and of the router's index."""

from __future__ import annotations

import random
from array import array
from hashlib import sha256

import pytest

from sglang_hybrid.routing.index import block_hashes

pytest.importorskip("sglang")

from sglang_hybrid.engine.cache.page_hash import get_hash, load_wide


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


def naive_wide(units: list[tuple[int, ...]], before: bytes, page: int) -> list[str]:
    names, digest = [], before
    for start in range(0, len(units), page):
        words = [token for unit in units[start : start + page] for token in unit]
        wide = max(words) >= 2**32
        digest = sha256(
            digest + b"\xff" * wide + b"".join(each.to_bytes(8 if wide else 4, "little") for each in words)
        ).digest()
        names.append(digest.hex())
    return names


@pytest.mark.parametrize("code", "qQ")
@pytest.mark.parametrize("page", [1, 3, 64, 200])
@pytest.mark.parametrize("bigram", [False, True])
def test_pages_with_images_of_62_bits(code: str, page: int, bigram: bool) -> None:
    rng, hashed = random.Random(page), load_wide().get_hash
    tokens = [rng.randrange(2**17) for _ in range(201)]
    tokens[70:90] = [2**62 + 10**6] * 20
    units = [(tokens[at], tokens[at + 1]) if bigram else (tokens[at],) for at in range(200)]
    for before in (None, sha256(b"x").digest()):
        want = naive_wide(units, before or b"", page)
        assert hashed(array(code, tokens), 200, 1 + bigram, bigram, before, page) == want
    assert hashed(array(code, tokens), 200, 1 + bigram, bigram, None, None) == naive_wide(units, b"", 200)[0]
    assert hashed(array(code, tokens), 60, 1, False, None, page) == get_hash(
        array(code, tokens), 60, 1, False, None, page
    )
    for wrong in (array("q", [-1, 2**40]), array("Q", [2**63])):
        with pytest.raises(IndexError):
            hashed(wrong, len(wrong), 1, False, None, page)


def test_sglangs_own_module_agrees_about_images() -> None:
    from sglang.srt.mem_cache.cpp_utils import native_hash

    original = getattr(native_hash._load_native_hash_module, "__wrapped__", None)
    try:
        module = original() if original else native_hash._load_native_hash_module()
    except RuntimeError as error:
        pytest.skip(f"SGLang's module is not built here: {error}")
    raw = array("q", [5] * 70 + [2**61] * 20 + [6] * 111)
    try:
        module.get_hash(raw, 200, 1, False, None, 64)
    except IndexError:
        pytest.skip("this SGLang's images have 30 bits")
    for page in (None, 1, 16, 64):
        for bigram in (False, True):
            asked = (raw, 200, 1 + bigram, bigram, sha256(b"y").digest(), page)
            assert load_wide().get_hash(*asked) == module.get_hash(*asked)


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
