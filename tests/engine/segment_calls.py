"""Requests with segments in the words of every endpoint: some that are refused, and any JSON in their fields."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

SEPARATOR = "<|next|>"
SEGMENT: dict[str, Any] = {"cache": "segment"}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": list(parts)}], **more}


def native(ranges: Any, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 2, "custom_params": {"segments": ranges}}
    return {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, **more}


PART = {"type": "text", "text": "the mill", **SEGMENT}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another word": ("/v1/chat/completions", chat({**PART, "cache": "yes"}), "messages.0.content.0.cache is 'segment'"),
    "on nothing": ("/v1/chat/completions", chat({**PART, "text": ""}), "content.0.cache: empty text is no segment"),
    "257 marks": ("/v1/chat/completions", chat(*[PART] * 257), "a request may mark 256 segments: 257"),
    "of Anthropic's": ("/v1/messages", chat({**PART, "cache": 1}), "messages.0.content.0.cache is 'segment': 1"),
    "a file": ("/v1/messages", chat(PDF), "messages.0.content.0.source.type is 'text' or 'content'"),
    "of responses": (
        "/v1/responses",
        {"model": "m", "input": [{"role": "user", "content": [{**PART, "type": "input_text", "cache": []}]}]},
        "input.0.content.0.cache is 'segment': []",
    ),
    "ranges of a chat": ("/v1/chat/completions", chat(PART, custom_params={"segments": [[0, 9**9]]}), "of the prompt"),
    "ranges of a completion": (
        "/v1/completions",
        {"model": "m", "prompt": "hello", "max_tokens": 2, "custom_params": {"segments": [[3, 1]]}},
        "custom_params.segments: a segment must end behind its start: [3, 1]",
    ),
    "separators alone": ("/v1/completions", {"model": "m", "prompt": SEPARATOR * 2}, "nothing but separators"),
    "257 separators": ("/v1/completions", {"model": "m", "prompt": SEPARATOR * 257 + "a"}, "may have 256 segments"),
    "both": ("/generate", {**native([[0, 1]]), "text": f"a{SEPARATOR}b", "input_ids": None}, "not by both"),
    "overlapping": ("/generate", native([[0, 3], [2, 4]]), "must not overlap: [2, 4] after [0, 3]"),
    "beyond the prompt": ("/generate", native([[0, 5]]), "must lie in the 4 tokens of the prompt: [0, 5]"),
    "below it": ("/generate", native([[-1, 3]]), "must lie in the 4 tokens"),
    "floats": ("/generate", native([[0.0, 3.0]]), "two whole numbers of tokens: [0.0, 3.0]"),
    "texts": ("/generate", native([["0", "3"]]), "two whole numbers of tokens"),
    "truths": ("/generate", native([[False, True]]), "two whole numbers of tokens"),
    "huge": ("/generate", native([[0, 2**63]]), "must lie in the 4 tokens"),
    "257 ranges": ("/generate", native([[0, 1]] * 257), "a request may mark 256 segments: 257"),
    "one of a batch": ("/generate", native([[0, 3]], input_ids=[[5, 6, 7], [5]]), "must lie in the 1 tokens"),
    "a turn of a session": ("/generate", native([[0, 3]], session_params={"id": "x"}), "a turn of a session marks no"),
    "nothing to compute": ("/hybrid/segments", {"segments": []}, "segments are 1 to 256 texts"),
    "beyond the context": ("/hybrid/segments", {"segments": ["a" * 5000]}, "to fit the context; split it: 5000"),
}  # fmt: skip
"""Path, body, and a part of what the answer says; the prompt of `native` has four tokens, the context 4096."""

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.sampled_from([0.5, 2**63, "", "segment", "a", SEPARATOR]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "a"]), inner, max_size=2)
    ),
    max_leaves=6,
)
RANGES = st.lists(st.lists(st.integers(-1, 120), min_size=1, max_size=3) | VALUES, max_size=4) | VALUES


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path, and a body with something in the fields of segments."""
    texts = st.lists(
        st.sampled_from(["", " ", "the old mill " * 9, "<|im_end|>", SEPARATOR, "é水", "\ud800"]), max_size=4
    )
    kind = draw(st.sampled_from(["chat", "anthropic", "responses", "completion", "native", "warm"]))
    parts = [{"type": "text", "text": text, "cache": draw(VALUES | st.just("segment"))} for text in draw(texts)]
    custom = {"custom_params": draw(st.none() | st.just({"segments": draw(RANGES), "segments_lost": draw(VALUES)}))}
    if kind == "warm":
        return "/hybrid/segments", {"segments": draw(st.lists(VALUES | st.text(max_size=3), max_size=3) | VALUES)}
    if kind == "native":
        return "/generate", {"input_ids": [9] * 100, "sampling_params": {"max_new_tokens": 1, **custom}}
    if kind == "completion":
        prompt = draw(st.sampled_from(["", SEPARATOR])).join(part["text"] for part in parts)
        return "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1, **custom}
    if kind == "anthropic":
        source = draw(VALUES | st.builds(lambda text: {"type": "text", "data": text}, VALUES))
        parts.append({"type": "document", "source": source, "title": draw(VALUES)})
        return "/v1/messages", {**chat(*parts), "max_tokens": 1}
    if kind == "responses":
        items = [{"role": "user", "content": [{**part, "type": "input_text"} for part in parts], "cache": draw(VALUES)}]
        return "/v1/responses", {"input": items, "max_output_tokens": 1}
    message = {"role": draw(st.sampled_from(["user", "tool", "system"])), "content": parts, "cache": draw(VALUES)}
    return "/v1/chat/completions", {"model": "m", "messages": [message], "max_tokens": 1, **custom}
