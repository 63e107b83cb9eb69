"""What entries are known by, and prompts that clients split by a separator."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.segment.geometry import MOST_SEGMENTS
from sglang_hybrid.segment.keys import CODES, DIGEST_BYTES, Identity, codes
from sglang_hybrid.segment.split import joined, split

TOKENS = array("q", [1, 2, 3])


def test_a_key_depends_on_everything_that_the_entry_depends_on() -> None:
    identity = Identity("model", 8, 8)
    keys = [
        identity.key(TOKENS),
        identity.key(array("q", [1, 2, 4])),
        identity.key(array("q", [1, 2])),
        identity.key(array("q", [1, 2, 3, 0])),
        identity.key(TOKENS, "tenant"),
        identity.key(TOKENS, "None"),
        identity.key(TOKENS, ""),
        replace(identity, fingerprint="other").key(TOKENS),
        replace(identity, head=9).key(TOKENS),
        replace(identity, tail=7).key(TOKENS),
        replace(identity, head=88, tail=8).key(TOKENS),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == DIGEST_BYTES for key in keys)
    assert Identity("model", 8, 8).key(array("q", [1, 2, 3])) == keys[0], "on any machine, at any time"
    assert keys[0].hex() == "bc9ff8624703f9cfe577e49b8ad3429e"


def test_codes_are_no_tokens_and_fit_32_bits() -> None:
    for key in (bytes(16), b"\xff" * 16, Identity("m", 0, 0).key(TOKENS)):
        found = codes(key)
        assert len(found) == CODES
        assert all(2**31 <= each < 2**32 for each in found)
    assert codes(bytes(16)) == array("q", [2**31] * CODES)
    for bit in range(31 * CODES):
        other = codes((1 << bit).to_bytes(16, "little"))
        assert [at for at in range(CODES) if other[at] != 2**31] == [bit // 31]


def test_a_prompt_is_split_where_the_separator_stands() -> None:
    assert split("a##b##c", "##") == ["a", "b", "c"]
    assert split("##a####b##", "##") == ["", "a", "", "b", ""]
    assert split("plain", "##") == ["plain"]
    assert split("", "##") == [""]
    assert len(split("#" * MOST_SEGMENTS, "#")) == MOST_SEGMENTS + 1
    with pytest.raises(ConfigError, match=f"may have {MOST_SEGMENTS} segments, this one has more: separator '#'"):
        split("#" * (MOST_SEGMENTS + 1), "#")
    with pytest.raises(ConfigError, match="at least one character"):
        split("a", "")


@pytest.mark.parametrize(
    ("parts", "ids", "ranges"),
    [
        (["ab", "c", "q"], b"abcq", {0: (0, 2), 1: (2, 3)}),
        (["", "ab", "", "q"], b"abq", {1: (0, 2)}),
        (["ab", ""], b"ab", {0: (0, 2)}),
        (["q"], b"q", {}),
        ([""], b"", {}),
        (["", ""], b"", {}),
    ],
)
def test_parts_are_tokenised_alone(parts: Sequence[str], ids: bytes, ranges: dict[int, tuple[int, int]]) -> None:
    asked = list[str]()

    def encode(text: str) -> Sequence[int]:
        asked.append(text)
        return text.encode()

    assert joined(parts, encode) == (array("q", list(ids)), ranges)
    assert asked == [part for part in parts if part], "the tokenizer is asked for no empty text"


def test_a_part_without_tokens_is_no_segment() -> None:
    assert joined(["ab", "?", "q"], lambda text: [] if text == "?" else [7]) == (array("q", [7, 7]), {0: (0, 1)})
