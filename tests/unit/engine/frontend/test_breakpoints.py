"""Cache breakpoints of chat clients: which marks a body has, and at which token each becomes a boundary."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache.boundaries import KEY, LOST
from sglang_hybrid.engine.frontend.marks.breakpoints import marked, shared, tokens_before, variants
from tests.unit.engine.frontend.rendering import QWEN, STRIPS, TOOLS, WORDS, Serving, ask

MARK = {"cache_control": {"type": "ephemeral"}}


def whole_tokens(serving: Serving, ids: list[int], content: str) -> range:
    """How many whole tokens of the prompt end before or with `content` in it, counted token by token.

    Where the white space at its end belongs is up to tokenizer and template.
    """
    used = serving.tokenizer_manager.tokenizer
    text = used.decode(ids)
    end = text.index(content.rstrip()) + len(content.rstrip())
    space = len(text[end:]) - len(text[end:].lstrip())
    lengths = [len(used.decode(ids[:count])) for count in range(len(ids) + 1)]
    return range(sum(each <= end for each in lengths) - 1, sum(each <= end + space for each in lengths))


def some(rng: random.Random, name: str) -> str:
    """A text that stands once in a prompt, and ends in a word, a sign, a space or line breaks."""
    return (
        name + " " + " ".join(rng.choices(WORDS, k=rng.randint(1, 40))) + rng.choice(["", ".", " ", "\n\n", ")\n", "9"])
    )


@pytest.mark.parametrize("known", ["template", "conversation", "tokens"])
@pytest.mark.parametrize("template", [QWEN, STRIPS])
@pytest.mark.parametrize("anthropic", [False, True])
def test_a_mark_becomes_the_token_where_its_content_ends(template: str, anthropic: bool, known: str) -> None:
    serving = Serving(template, known)
    for seed in range(25):
        rng = random.Random(seed)
        texts = [some(rng, f"number{n}") for n in range(5)]
        parts = [{"type": "text", "text": text} for text in texts]
        chosen = sorted(rng.sample(range(4), 2))
        for n in chosen:
            parts[n].update(MARK)
        body: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": parts[1:3]}]}
        body["messages"] += [{"role": "assistant", "content": [parts[3]]}, {"role": "user", "content": texts[4]}]
        if anthropic:
            body["system"] = [parts[0]]
        else:
            body["messages"].insert(0, {"role": "system", "content": [parts[0]]})
        params, ids = ask(serving, body, anthropic)
        assert LOST not in params
        for n, at in zip(chosen, params[KEY], strict=True):
            assert at in whole_tokens(serving, ids, texts[n]), (seed, texts[n])


def test_tools_end_where_another_tool_could_follow() -> None:
    serving = Serving(QWEN)
    for at in range(3):
        tools = [{**tool, **MARK} if n == at else tool for n, tool in enumerate(TOOLS)]
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "tools": tools}
        params, ids = ask(serving, body)
        text = serving.tokenizer_manager.tokenizer.decode(ids[: params[KEY][0]])
        assert (text.count('"name": '), text.rstrip()[-1]) == (at + 1, "}")


def test_calls_and_results_of_tools_and_the_whole_request() -> None:
    serving = Serving(QWEN)
    call = {"type": "tool_use", "id": "a", "name": "open", "input": {"gate": 3}, **MARK}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "it is open", **MARK}]}
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 5,
        "tools": [{"name": "open", "input_schema": {"type": "object"}, **MARK}],
        "messages": [
            {"role": "user", "content": "open the gate"},
            {"role": "assistant", "content": [{"type": "text", "text": "well"}, call]},
            {"role": "user", "content": [result]},
        ],
    }
    params, ids = ask(serving, body, anthropic=True)
    ends = [serving.tokenizer_manager.tokenizer.decode(ids[:at]) for at in params[KEY]]
    assert ends[0].rstrip().endswith("}")
    assert "gate" in ends[1].rpartition("arguments")[2]
    assert ends[2].endswith("it is open")
    del result["content"][0]["cache_control"], call["cache_control"]
    params, ids = ask(serving, {**body, **MARK}, anthropic=True)
    assert serving.tokenizer_manager.tokenizer.decode(ids[: params[KEY][-1]]).endswith("it is open")


def test_a_message_that_only_calls_a_tool() -> None:
    serving = Serving(QWEN)
    call = {"id": "a", "type": "function", "function": {"name": "open", "arguments": '{"gate": 4821}'}}
    marked_call = {"role": "assistant", "content": "", "tool_calls": [call], **MARK}
    result = {"role": "tool", "tool_call_id": "a", "content": "it is open"}
    params, ids = ask(serving, {"model": "m", "messages": [{"role": "user", "content": "open"}, marked_call, result]})
    assert "4821" in serving.tokenizer_manager.tokenizer.decode(ids[: params[KEY][0]])
    call["function"] = {"name": "open", "arguments": "no json"}
    params, _ = ask(serving, {"model": "m", "messages": [{"role": "user", "content": "open"}, marked_call, result]})
    assert params == {LOST: 1}


def test_what_the_template_swallows_is_reported_not_guessed() -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}
    body["messages"].append({"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x", **MARK}]})
    assert ask(Serving(STRIPS), body)[0] == {LOST: 1}
    assert ask(Serving(STRIPS), {**body, "tools": [{**TOOLS[0], **MARK}]})[0] == {LOST: 2}
    assert ask(Serving(QWEN), {**body, "input_ids": [5, 6, 7]})[0] == {LOST: 1}


def test_a_prompt_beyond_the_context_is_rendered_once() -> None:
    serving, part = Serving(QWEN), {"type": "text", "text": "why", **MARK}
    rendered = []
    process = serving.tokenizer_manager.tokenizer.apply_chat_template

    def count(*args: Any, **options: Any) -> Any:
        rendered.append(args)
        return process(*args, **options)

    serving.tokenizer_manager.tokenizer.apply_chat_template = count
    serving.tokenizer_manager.context_len = 3
    assert ask(serving, {"model": "m", "messages": [{"role": "user", "content": [part]}]})[0] == {LOST: 1}
    assert len(rendered) == 1


def test_own_boundaries_stay_and_a_request_without_marks_is_untouched() -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    assert ask(Serving(QWEN), body)[0] is None
    body["messages"][0]["content"][0]["prompt_cache_breakpoint"] = {"mode": "explicit"}
    params, ids = ask(Serving(QWEN), {**body, "custom_params": {KEY: [1], "other": 2}})
    (end,) = whole_tokens(Serving(QWEN), ids, "hi")
    assert params == {KEY: [1, end], "other": 2}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no object": ({"cache_control": "yes"}, "messages.0.content.0.cache_control is an object: 'yes'"),
    "no type": ({"cache_control": {}}, "cache_control.type is 'ephemeral': None"),
    "unknown type": ({"cache_control": {"type": "pinned"}}, "cache_control.type is 'ephemeral': 'pinned'"),
    "unknown ttl": ({"cache_control": {"type": "ephemeral", "ttl": "7d"}}, "cache_control.ttl is '5m' or '1h': '7d'"),
    "a number": ({"cache_control": {"type": "ephemeral", "ttl": 300}}, "cache_control.ttl is '5m' or '1h': 300"),
    "unhashable": ({"cache_control": {"type": ["ephemeral"]}}, r"cache_control.type is 'ephemeral': \['ephemeral'\]"),
    "unknown mode": ({"prompt_cache_breakpoint": {"mode": "x"}}, "prompt_cache_breakpoint.mode is 'explicit': 'x'"),
    "empty": ({"text": "", **MARK}, "messages.0.content.0: empty content cannot be marked"),
    "thinking": ({"type": "thinking", "thinking": "hm", **MARK}, "thinking cannot be marked"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_mark_that_is_none_is_refused_by_name(what: str) -> None:
    more, says = BAD[what]
    with pytest.raises(ConfigError, match=says):
        marked({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **more}]}]})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "", **MARK}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [], **MARK}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", **MARK}]},
        {"role": "tool", "tool_call_id": "a", "content": "", **MARK},
    ],
)
def test_the_result_of_a_tool_that_said_nothing_can_be_marked(message: dict[str, Any]) -> None:
    """Agents mark what they sent last, and a command may have no output."""
    body = {"messages": [{"role": "user", "content": "go on"}, message]}
    (path,) = marked(body)
    (other,) = variants(body, path)
    assert other != body


def test_lifetimes_of_other_services_are_known() -> None:
    def body(ttl: str) -> dict[str, Any]:
        control = {"cache_control": {"type": "ephemeral", "ttl": ttl}}
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **control}]}]}

    for ttl in ("5m", "1h", "3600s", "24h"):
        assert len(marked(body(ttl))) == 1
    assert len(marked(body("1h"), anthropic=True)) == 1
    for ttl in ("3600s", "24h"):
        with pytest.raises(ConfigError, match="ttl is '5m' or '1h'"):
            marked(body(ttl), anthropic=True)
    for ttl in ("0s", "-5m", "1e9h", "soon", "5m "):
        with pytest.raises(ConfigError, match="ttl is '5m' or '1h'"):
            marked(body(ttl))


def test_too_many_marks_are_refused() -> None:
    def body(count: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **MARK}] * count}]}

    assert len(marked(body(32))) == 32
    assert len(marked(body(4), anthropic=True)) == 4
    with pytest.raises(ConfigError, match="at most 32 cache breakpoints: 33"):
        marked(body(33))
    with pytest.raises(ConfigError, match="at most 4 cache breakpoints: 5"):
        marked(body(5), anthropic=True)


@pytest.mark.parametrize(
    "body", [None, [], "a", {"messages": 3}, {"messages": [None, 4, {"content": {}}]}, {"tools": {}}]
)
def test_bodies_of_other_shapes_have_no_marks(body: Any) -> None:
    assert marked(body) == []


def test_shared_beginnings_and_whole_tokens() -> None:
    assert [shared(a, b) for a, b in (("", "a"), ("abc", "abd"), ("abc", "abc"), ("abc", "abcd"))] == [0, 2, 3, 3]
    encode: Callable[[str], list[int]] = lambda text: [len(word) for word in text.split("|")]  # noqa: E731
    text = "a|bb|ccc|dddd|eeeee"
    assert [tokens_before(encode, encode(text), text, end) for end in (1, 4, 8, 13, 19)] == [1, 2, 3, 4, 5]


KEYS = st.sampled_from(
    ("messages", "tools", "system", "content", "text", "type", "input", "function", "cache_control", "mode", "name")
)
LEAVES = st.none() | st.integers(0, 2) | st.sampled_from(("", "a", "ephemeral", "text", "tool_result", "thinking"))
BODIES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=4)
        | inner.map(lambda i: {**MARK, "text": i})
    ),
    max_leaves=30,
)


@given(st.dictionaries(st.sampled_from(("messages", "tools", "system", "cache_control")), BODIES))
def test_whatever_a_body_holds_it_has_marks_or_is_refused(body: dict[str, Any]) -> None:
    before = json.dumps(body)
    try:
        paths = marked(body)
    except ConfigError:
        return
    for path in paths:
        assert all(variant != body for variant in variants(body, path))
    assert json.dumps(body) == before
