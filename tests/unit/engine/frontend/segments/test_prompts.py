"""Prompts with a separator, and ranges of tokens that a client names."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.segments.prompts import around, divide, parts
from sglang_hybrid.engine.frontend.tokenization import pages
from sglang_hybrid.engine.frontend.validation.prompt import require_prompt
from sglang_hybrid.engine.segments import marked
from sglang_hybrid.engine.segments.marked import KEY, LOST
from tests.unit.engine.frontend.rendering import QWEN, WORDS, tokenizer

SEPARATOR = " # # "
ON = {"segments": "on", "segment_separator": SEPARATOR}
ONE, TWO = ("the old mill keeps its gate code. " * 3, "Mira's brother (the baker) asks: which day?\n" * 2)


@pytest.fixture(autouse=True)
def on(configure: Callable[..., None]) -> None:
    configure(**ON)


@pytest.fixture(scope="module")
def used() -> Any:
    return tokenizer(QWEN)


def request(text: Any, params: Any = None, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(text=text, input_ids=None, sampling_params=params, **more)


def segments(used: Any, obj: SimpleNamespace) -> list[str]:
    return [used.decode(obj.input_ids[a:b]) for a, b in obj.sampling_params["custom_params"][KEY]]


def test_parts_are_tokenised_by_themselves_and_the_separator_is_gone(used: Any) -> None:
    obj = request(SEPARATOR.join([ONE, TWO, "Well?"]), {"n": 2, "custom_params": {"other": 1}})
    given = json.loads(json.dumps(obj.sampling_params))
    divide(obj, used, "/generate")
    assert obj.text is None
    assert used.decode(obj.input_ids) == ONE + TWO + "Well?"
    for found, text in zip(segments(used, obj), (ONE, TWO), strict=True):
        assert found in text
        assert len(text) - len(found) <= 8
    assert obj.sampling_params == {
        "n": 2, "custom_params": {"other": 1, KEY: obj.sampling_params["custom_params"][KEY]}
    }  # fmt: skip
    other = request(SEPARATOR.join([TWO, ONE, "Well?"]))
    divide(other, used, "/v1/completions")
    assert segments(used, other) == segments(used, obj)[::-1]
    assert given == {"n": 2, "custom_params": {"other": 1}}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"{SEPARATOR}{ONE}{SEPARATOR}q", 1),
        (f"{ONE}{SEPARATOR}{SEPARATOR}{TWO}{SEPARATOR}q", 2),
        (f"{ONE}{SEPARATOR}", 1),
        (f"{SEPARATOR}q", 0),
        (f"{SEPARATOR}{SEPARATOR}{SEPARATOR}q{SEPARATOR}", 1),
    ],
)
def test_empty_parts_are_no_segments(used: Any, text: str, count: int) -> None:
    obj = request(text)
    divide(obj, used, "/generate")
    assert used.decode(obj.input_ids) == text.replace(SEPARATOR, "")
    if count:
        assert len(segments(used, obj)) == count
    else:
        assert not obj.sampling_params


def test_a_batch_has_segments_for_each_of_its_prompts(used: Any) -> None:
    obj = request([f"{ONE}{SEPARATOR}a", "plain", f"b{SEPARATOR}{TWO}{SEPARATOR}c"], {"temperature": 0})
    divide(obj, used, "/v1/completions")
    assert obj.input_ids[1] == used.encode("plain")
    assert obj.sampling_params[1] == {"temperature": 0}
    assert [len(each.get("custom_params", {}).get(KEY, ())) for each in obj.sampling_params] == [1, 0, 2]
    obj = request([f"{ONE}{SEPARATOR}a", "plain"], [{"n": 1}, {"n": 1, "top_k": 3}])
    divide(obj, used, None)
    assert obj.sampling_params[1] == {"n": 1, "top_k": 3}


def test_what_stays_as_it_is(used: Any, configure: Callable[..., None]) -> None:
    text = f"{ONE}{SEPARATOR}q"
    untouched = [request("no separator"), request(["no", "separators"]), request(None)]
    for obj in untouched:
        before = dict(vars(obj))
        divide(obj, used, "/generate")
        assert vars(obj) == before
    for path, obj, with_tokenizer in (
        ("/v1/chat/completions", request(text), used),
        ("/generate", request(text), None),
        ("/generate", request(text, is_cross_encoder_request=False), used),
    ):
        divide(obj, with_tokenizer, path)
        assert obj.text == text
    for off in ({"segments": "off"}, {"segment_separator": ""}):
        configure(**{**ON, **off})
        obj = request(text)
        divide(obj, used, "/generate")
        assert obj.text == text


def test_special_tokens_and_sessions_make_plain_text(used: Any) -> None:
    obj = request(f"ends <|im_end|> here{SEPARATOR}{ONE}{SEPARATOR}q")
    divide(obj, used, "/generate")
    assert obj.sampling_params["custom_params"][LOST] == 1
    assert len(segments(used, obj)) == 1
    obj = request(f"{TWO}{SEPARATOR}{ONE}{SEPARATOR}q", session_params={"id": "s"})
    divide(obj, used, "/generate")
    assert obj.sampling_params["custom_params"] == {LOST: 2}


def test_refused_with_the_remedy(used: Any) -> None:
    for text, params, says in (
        (SEPARATOR * 2, None, "the prompt has nothing but separators ' # # '; put text between them"),
        (f"a{SEPARATOR}b", {"custom_params": {KEY: [[0, 1]]}}, r"by custom_params.segments, not by both: \[\[0, 1\]\]"),
        (SEPARATOR.join("a" * 258), None, "may have 256 segments, this one has more"),
        (f"half \ud800 a pair{SEPARATOR}b", None, "characters that are none of Unicode's: 'half "),
    ):
        with pytest.raises(ConfigError, match=says):
            divide(request(text, params), used, "/generate")
    divide(request(SEPARATOR.join("a" * 257)), used, "/generate")


def test_what_a_tokenizer_puts_around_a_prompt_stays_around_it() -> None:
    from tokenizers.processors import TemplateProcessing

    used = tokenizer(QWEN)
    start, end = (used.convert_tokens_to_ids(f"<|im_{word}|>") for word in ("start", "end"))
    used.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", start), ("<|im_end|>", end)]
    )
    assert around(used) == ([start], [end])
    ids, found, lost = parts(used, f"{ONE}{SEPARATOR}{TWO}{SEPARATOR}q", SEPARATOR)
    assert (ids[0], ids[-1], lost) == (start, end, 0)
    assert [used.decode(ids[a:b]) in text for (a, b), text in zip(found, (ONE, TWO), strict=True)] == [True, True]
    assert not {start, end} & {token for a, b in found for token in ids[a:b]}


def test_a_router_is_told_of_the_same_prompt(used: Any) -> None:
    serving = SimpleNamespace(tokenizer_manager=SimpleNamespace(tokenizer=used))
    text, obj = f"{ONE}{SEPARATOR}{TWO}", request(f"{ONE}{SEPARATOR}{TWO}")
    divide(obj, used, "/generate")
    assert pages._ids(serving, "/generate", {"text": text}, None) == obj.input_ids
    assert pages._ids(serving, "/v1/completions", {"prompt": "a b"}, None) == used.encode("a b")


@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), min_size=1, max_size=6))
def test_whatever_the_parts_are_the_text_stays(used: Any, texts: list[str]) -> None:
    ids, found, lost = parts(used, SEPARATOR.join(texts), SEPARATOR)
    assert used.decode(ids) == "".join(texts)
    assert lost == 0 or any(len(used.encode(text)) < 8 for text in texts), "too few tokens to be sure of one"
    assert all(a < b <= c for (a, b), (c, _) in pairwise(found))


MANAGER = SimpleNamespace(
    model_config=SimpleNamespace(vocab_size=100, is_multimodal=False), context_len=1000, tokenizer=None
)


def require(given: Any, **more: Any) -> None:
    obj = SimpleNamespace(
        input_ids=None, contains_mm_input=lambda: False, sampling_params={"custom_params": given}, **more
    )
    require_prompt(MANAGER, obj, list(range(50)))


BAD: dict[str, tuple[Any, str]] = {
    "a text": ("0-9", "custom_params.segments: segments must be a list of .* '0-9'"),
    "an object": ({"0": 9}, "segments must be a list"),
    "numbers": ([0, 9], r"a segment must be \[start, end\), two whole numbers of tokens: 0"),
    "three numbers": ([[0, 3, 9]], r"two whole numbers of tokens: \[0, 3, 9\]"),
    "floats": ([[0.0, 9.0]], "two whole numbers of tokens"),
    "texts": ([["0", "9"]], "two whole numbers of tokens"),
    "two letters": (["ab"], "two whole numbers of tokens: 'ab'"),
    "truths": ([[False, True]], "two whole numbers of tokens"),
    "backwards": ([[9, 3]], r"a segment must end behind its start: \[9, 3\]"),
    "empty": ([[9, 9]], "must end behind its start"),
    "before the prompt": ([[-1, 9]], "must lie in the 50 tokens of the prompt"),
    "behind it": ([[0, 51]], r"must lie in the 50 tokens of the prompt: \[0, 51\]"),
    "huge": ([[0, 10**300]], "must lie in the 50 tokens"),
    "overlapping": ([[0, 9], [8, 12]], r"must be in order and must not overlap: \[8, 12\] after \[0, 9\]"),
    "out of order": ([[20, 29], [0, 9]], "must be in order"),
    "too many": ([[0, 1]] * 257, "a request may mark 256 segments: 257"),
}


@pytest.mark.parametrize("what", BAD)
def test_ranges_that_are_none_are_refused_by_name(what: str, configure: Callable[..., None]) -> None:
    value, says = BAD[what]
    with pytest.raises(ConfigError, match=says) as caught:
        require({KEY: value})
    assert str(caught.value).startswith("custom_params.segments: ")
    assert len(str(caught.value)) < 250
    configure(segments="off")
    require({KEY: value})  # a word of somebody else's


def test_ranges_in_the_prompt() -> None:
    require({KEY: [[0, 9], [9, 50]], "other": 1})
    require({KEY: []})
    require({KEY: None})
    with pytest.raises(ConfigError, match="a turn of a session marks no segments"):
        require({KEY: [[0, 9]]}, session_params={"id": "s"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 60) | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=8,
)


@given(JSON | st.lists(st.lists(st.integers(-1, 60), max_size=3), max_size=4), st.integers(0, 60))
def test_whatever_stands_in_the_fields_it_is_ranges_or_a_refusal(value: Any, tokens: int) -> None:
    for custom in ({KEY: value, LOST: value}, value):
        assert 0 <= marked.lost(custom) <= 256
        try:
            found = marked.named(custom, tokens)
        except ConfigError:
            continue
        assert all(0 <= a < b <= tokens for a, b in found)
