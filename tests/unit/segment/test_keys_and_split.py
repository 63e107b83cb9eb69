"""What entries are known by, and prompts that clients split by a separator."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.segment.geometry import MOST_SEGMENTS
from sglang_hybrid.segment.keys import DIGEST_BYTES, Identity, code
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


def test_a_code_is_no_token_and_fits_an_int64() -> None:
    for key in (bytes(16), b"\xff" * 16, Identity("m", 0, 0).key(TOKENS)):
        assert 2**62 <= code(key) < 2**63
        assert array("q", [code(key)])[0] == code(key)
    assert code(b"\x01" + bytes(15)) != code(bytes(16))


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
        (["ab", "c", "q"], b"abcq", [(0, 2), (2, 3)]),
        (["", "ab", "", "q"], b"abq", [(0, 2)]),
        (["ab", ""], b"ab", [(0, 2)]),
        (["q"], b"q", []),
        ([""], b"", []),
        (["", ""], b"", []),
    ],
)
def test_parts_are_tokenised_by_themselves(parts: Sequence[str], ids: bytes, ranges: list[tuple[int, int]]) -> None:
    asked = list[str]()

    def encode(text: str) -> Sequence[int]:
        asked.append(text)
        return text.encode()

    assert joined(parts, encode) == (array("q", list(ids)), ranges)
    assert asked == [part for part in parts if part], "the tokenizer is asked for no empty text"


def test_a_part_without_tokens_is_no_segment() -> None:
    assert joined(["ab", "?", "q"], lambda text: [] if text == "?" else [7]) == (array("q", [7, 7]), [(0, 1)])
