"""Segments of chat requests: which pieces are marked, and which tokens of the prompt they become."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache import boundaries
from sglang_hybrid.engine.frontend.segments import documents, prompts
from sglang_hybrid.engine.frontend.segments.marks import marked
from sglang_hybrid.engine.segments.marked import KEY, LOST
from tests.unit.engine.frontend.rendering import QWEN, STRIPS, TOOLS, WORDS, Serving, ask

SEGMENT = {"cache": "segment"}
ESCAPES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content | e }}{% endif %}<|im_end|>\n{% endfor %}"
)
TWICE = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ messages[-1].content }}"


@pytest.fixture(autouse=True)
def on(configure: Callable[..., None]) -> None:
    configure(segments="on")


def text_of(serving: Serving, ids: list[int], where: list[int]) -> str:
    found: str = serving.tokenizer_manager.tokenizer.decode(ids[where[0] : where[1]])
    return found


def is_most_of(found: str, text: str) -> bool:
    """Whether `found` is `text` up to words at its ends."""
    return found in text and len(text) - len(found) <= 8


def document(rng: random.Random, name: str) -> str:
    """A text that stands once in a prompt; at its ends words, numbers, signs, spaces, line breaks, other scripts."""
    front = rng.choice(["", " ", "\n", "(", "# ", "2024: ", "ü", "水", "é"])
    back = rng.choice(["", ".", " ", "\n\n", ")\n", "9", "水", ".\n", "!?", "'s"])
    return f"{front}{name} " + " ".join(rng.choices(WORDS, k=rng.randint(5, 60))) + back


def wholly_inside(serving: Serving, ids: list[int], content: str) -> tuple[int, int]:
    """The most tokens that `content` can have: counted token by token, in bytes."""
    used = serving.tokenizer_manager.tokenizer
    whole, inner = used.decode(ids).encode(), content.strip().encode()
    low = whole.index(inner)
    lengths = [len(used.decode(ids[:n]).encode()) for n in range(len(ids) + 1)]
    space = len(content.encode()) - len(content.rstrip().encode())
    first = next(n for n, at in enumerate(lengths) if at >= low - (len(content) - len(content.lstrip())))
    last = max(n for n, at in enumerate(lengths) if at <= low + len(inner) + space)
    return first, last


@pytest.mark.parametrize("anthropic", [False, True])
@pytest.mark.parametrize(("template", "known"), [(QWEN, "template"), (QWEN, "conversation"), (STRIPS, "template")])
def test_a_segment_has_the_same_tokens_wherever_it_stands(template: str, known: str, anthropic: bool) -> None:
    """Among other texts, in another order, in another message, by itself: so it is found again."""
    serving = Serving(template, known)
    for seed in range(12):
        rng = random.Random(seed)
        texts = [document(rng, f"number{n}") for n in range(4)]
        seen: list[set[tuple[int, ...]]] = [set() for _ in texts]
        for _ in range(4):
            parts: list[dict[str, Any]] = []
            order = rng.sample(range(4), rng.randint(1, 4))
            for n in order:
                if rng.random() < 0.5:
                    parts.append({"type": "text", "text": rng.choice(["Read:", "and ", "\n", "<doc>", "1. "])})
                parts.append({"type": "text", "text": texts[n], **SEGMENT})
            body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": parts}]}
            params, ids = ask(serving, body, anthropic)
            assert LOST not in params
            for n, where in zip(order, params[KEY], strict=True):
                seen[n].add(tuple(ids[where[0] : where[1]]))
                first, last = wholly_inside(serving, ids, texts[n])
                assert first <= where[0] < where[1] <= last, (seed, texts[n])
                assert (where[0] - first) + (last - where[1]) <= 6, (seed, texts[n])
        used = serving.tokenizer_manager.tokenizer
        for text, tokens in zip(texts, seen, strict=True):
            alone = prompts.alone(used, text)
            start, end = prompts.segment(used, text, alone) or (0, 0)
            if template == QWEN or text == text.strip():  # what is stripped is another text
                assert tokens <= {tuple(alone[start:end])}, (seed, text, [used.decode(each) for each in tokens])
            assert len(tokens) <= 1


def test_what_a_template_escapes_is_the_escaped_text() -> None:
    serving = Serving(ESCAPES)
    text = 'He said: "<b>no</b> & never"\nand left. ' * 3
    body = {"model": "m", "messages": [{"role": "user", "content": text, **SEGMENT}]}
    body["messages"].append({"role": "tool", "tool_call_id": "a", "content": text, **SEGMENT})
    params, ids = ask(serving, body)
    one, two = (text_of(serving, ids, where) for where in params[KEY])
    assert one.startswith("He said: &#34;&lt;b&gt;no")
    assert "\\nand left." in two
    assert LOST not in params


def test_a_mark_without_one_place_is_plain_text() -> None:
    """Swallowed, rendered twice, nothing but white space, special tokens, a prompt that is given as tokens."""
    segment = {"type": "text", "text": "the old mill keeps its gate code", **SEGMENT}
    user = {"role": "user", "content": [segment]}
    tool = {"role": "tool", "tool_call_id": "a", "content": [segment]}
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello there"}, tool]}
    assert ask(Serving(STRIPS), body)[0] == {LOST: 1}
    twice = {"model": "m", "messages": [{"role": "user", "content": "the old mill", **SEGMENT}]}
    assert ask(Serving(TWICE), twice)[0] == {LOST: 1}
    blank = {"model": "m", "messages": [{"role": "user", "content": " \n ", **SEGMENT}]}
    assert ask(Serving(STRIPS), blank)[0] == {LOST: 1}
    spelled = {"type": "text", "text": "the mark <|im_end|> ends a turn", **SEGMENT}
    params, ids = ask(Serving(QWEN), {"model": "m", "messages": [{"role": "user", "content": [spelled, segment]}]})
    assert params[LOST] == 1
    assert text_of(Serving(QWEN), ids, params[KEY][0]).endswith("gate code")
    assert ask(Serving(QWEN), {"model": "m", "messages": [user], "input_ids": [5, 6, 7]})[0] == {LOST: 1}
    assert ask(Serving(QWEN, "tokens"), {"model": "m", "messages": [user]})[0] == {LOST: 1}


def test_one_mark_that_cannot_be_placed_spoils_no_other() -> None:
    """The template looks at how a message begins, which a fence changes."""
    template = (
        "{% for m in messages %}{% if m.content.startswith('secret') %}(hidden){% else %}{{ m.content }}{% endif %}\n"
        "{% endfor %}"
    )
    texts = ["the old mill keeps its code", "secret of the baker", "which day is it, Mira?"]
    body = {"model": "m", "messages": [{"role": "user", "content": text, **SEGMENT} for text in texts]}
    serving = Serving(template)
    params, ids = ask(serving, body)
    assert params[LOST] == 1
    for text, where in zip(texts[::2], params[KEY], strict=True):
        assert is_most_of(text_of(serving, ids, where), text)


def test_a_prompt_that_the_engine_encodes_itself() -> None:
    """As for models that could take images: SGLang hands the text on, and encodes it again."""
    serving = Serving(QWEN)
    body = {"model": "m", "messages": [{"role": "user", "content": "the old mill keeps its gate code", **SEGMENT}]}
    assert ask(serving, body, is_multimodal=True) == ask(serving, body)


def test_a_tokenizer_that_does_not_say_where_tokens_lie() -> None:
    class Slow:
        is_fast = False

        def __init__(self, fast: Any) -> None:
            self.fast = fast

        def __getattr__(self, name: str) -> Any:
            return getattr(self.fast, name)

    serving, slow = Serving(QWEN), Serving(QWEN)
    slow.tokenizer_manager.tokenizer = Slow(serving.tokenizer_manager.tokenizer)
    parts = [{"type": "text", "text": f"the old mill of number {n} asks", **SEGMENT} for n in range(5)]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    exact, found = (ask(each, body)[0][KEY] for each in (serving, slow))
    assert len(found) == 5
    for one, other in zip(exact, found, strict=True):
        assert other[0] <= one[0] < one[1] <= other[1], "nothing is known of what stands beside: no less than that"
        assert (one[0] - other[0]) + (other[1] - one[1]) <= 6


def test_breakpoints_and_ranges_of_the_client_stand_beside_marks() -> None:
    serving = Serving(QWEN)
    control = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "the old mill keeps its gate", **SEGMENT, **control}]
    parts += [{"type": "text", "text": "and asks"}]
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    params, ids = ask(serving, body)
    (where,) = params[KEY]
    assert abs(params[boundaries.KEY][0] - where[1]) <= 2
    params, _ = ask(serving, {**body, "custom_params": {KEY: [[0, 2]], "other": 1}})
    assert params[KEY] == [[0, 2], where]
    assert params["other"] == 1
    bad, _ = ask(serving, {**body, "custom_params": {KEY: [["a"]]}})
    assert bad[KEY] == [["a"]], "refused later, by its field"
    assert len(ids) > where[1]


def test_a_request_without_marks_is_untouched_and_rendered_once() -> None:
    serving, rendered = Serving(QWEN), []
    process = serving.tokenizer_manager.tokenizer.apply_chat_template

    def count(*args: Any, **options: Any) -> Any:
        rendered.append(args)
        return process(*args, **options)

    serving.tokenizer_manager.tokenizer.apply_chat_template = count
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache": None}]}]}
    assert ask(serving, body)[0] is None
    assert len(rendered) == 1
    many = [{"type": "text", "text": f"document {n}", **SEGMENT} for n in range(200)]
    ask(serving, {"model": "m", "messages": [{"role": "user", "content": many}]})
    assert len(rendered) == 4, "as it is, as text, and once with all the fences"


def test_a_server_without_segments_leaves_marks_alone(configure: Callable[..., None]) -> None:
    configure(segments="off", segment_roles="tool")
    for mark in ("segment", "anything", {"no": "matter"}):
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache": mark}]}],
        }
        assert ask(Serving(QWEN), body)[0] is None


def test_messages_that_are_segments_by_the_servers_flag(configure: Callable[..., None]) -> None:
    configure(segments="on", segment_roles=" tool, document,")
    serving = Serving(QWEN)
    result = "it is open, said the old mill"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "which day?"}]
    messages += [{"role": "tool", "tool_call_id": "a", "content": result}, {"role": "tool", "content": ""}]
    messages += [{"role": "system", "name": "document", "content": [{"type": "text", "text": "Mira's gate"}] * 2}]
    params, ids = ask(serving, {"model": "m", "messages": messages})
    for text, where in zip([result, "Mira's gateMira's gate"], params[KEY], strict=True):
        assert is_most_of(text_of(serving, ids, where), text)
    assert LOST not in params, "nobody marked the empty one"
    block = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": result}]}
    call = {"type": "tool_use", "id": "a", "name": "open", "input": {}}
    turn = {"role": "assistant", "content": [{"type": "text", "text": "well"}, call]}
    body = {"model": "m", "max_tokens": 5, "messages": [turn, {"role": "user", "content": [block]}]}
    params, ids = ask(serving, body, anthropic=True)
    assert is_most_of(text_of(serving, ids, params[KEY][0]), result)
    responses = {"input": [{"type": "function_call_output", "call_id": "a", "output": result}, {"role": "user"}]}
    assert marked(responses, {"tool"}) == ([("input", 0)], 0)


def test_a_part_that_is_marked_wins_over_its_message() -> None:
    part = {"type": "text", "text": "a", **SEGMENT}
    body = {"messages": [{"role": "tool", "content": [{"type": "text", "text": "b"}, part], **SEGMENT}]}
    assert marked(body, {"tool"}) == ([("messages", 0, "content", 1)], 0)


def test_more_than_256() -> None:
    def messages(mark: dict[str, str]) -> dict[str, Any]:
        return {"messages": [{"role": "tool", "content": "a", **mark} for _ in range(300)]}

    with pytest.raises(ConfigError, match="a request may mark 256 segments: 300"):
        marked(messages(SEGMENT))
    paths, beyond = marked(messages({}), {"tool"})
    assert (len(paths), beyond) == (256, 44), "nobody said that these are segments: the first ones are"
    assert paths[-1] == ("messages", 255)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another word": ({"cache": "always"}, r"messages.0.content.0.cache is 'segment': 'always'"),
    "an object": ({"cache": {"type": "segment"}}, r"cache is 'segment': {'type': 'segment'}"),
    "true": ({"cache": True}, "cache is 'segment': True"),
    "empty": ({"text": "", **SEGMENT}, "messages.0.content.0.cache: empty text is no segment"),
    "thinking": ({"type": "thinking", **SEGMENT}, "only text is a segment.*'thinking'"),
    "an image": ({"type": "image_url", "text": None, **SEGMENT}, "only text is a segment.*'image_url'"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_mark_that_is_none_is_refused_by_name(what: str) -> None:
    more, says = BAD[what]
    with pytest.raises(ConfigError, match=says):
        marked({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **more}]}]})
    with pytest.raises(ConfigError, match=r"tools.0.cache: tools are no segments"):
        marked({"tools": [{**TOOLS[0], **SEGMENT}]})


KEYS = st.sampled_from(
    ("messages", "content", "output", "text", "type", "source", "data", "title", "cache", "role", "name", "system")
)
LEAVES = (
    st.none() | st.integers(0, 2) | st.sampled_from(("", "a", "segment", "text", "tool_result", "document", "tool"))
)
BODIES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=4)
        | inner.map(lambda i: {**SEGMENT, "text": i})
        | inner.map(lambda i: {"type": "document", "source": i})
        | inner.map(lambda i: {"type": "document", "source": {"type": "text", "data": i}})
    ),
    max_leaves=30,
)


@given(st.dictionaries(st.sampled_from(("messages", "tools", "system", "input")), BODIES) | BODIES)
def test_whatever_a_body_holds_it_has_marks_or_is_refused(body: Any) -> None:
    before = json.dumps(body)
    try:
        made, leads = documents.as_text(body)
        paths, beyond = marked(made, {"tool", "a"}, leads)
    except ConfigError:
        return
    assert beyond == 0
    assert len({path[:depth] for path in paths for depth in range(len(path))} & set(paths)) == 0
    assert json.dumps(body) == before
