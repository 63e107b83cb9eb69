"""Bodies for SGLang's endpoints, drawn from its own OpenAPI document: nearly right, hostile in one to three places."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Json = Any
Document = dict[str, Any]

TEXTS = ["", "a", "hi there", "a\nb", "\x00", "é\u2028", "x" * 3_000, "{", "(", "(a+)+b", "5", "null", "json", "auto"]
BITS = [2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**63, -(2**63), 2**64 - 1]
INTEGERS = [0, 1, 2, 3, 7, -1, -3, 300, 319, 320, 1_000_000, *BITS]
NUMBERS = [0.0, 0.5, 1.0, 2.0, -1.0, 1e-300, 1e-40, 1e38, 1e300, -1e300]
DEEP: Json = [0]
for _ in range(100):
    DEEP = [DEEP]

hostile = st.sampled_from(
    [
        None, True, False, *INTEGERS, *NUMBERS, *TEXTS, [], [[]], [None], [[], [5]], [5, -1], [5, 10**6], [2**63],
        [[5, 6], [7]], [5, "a"], ["a", ""], [{}], [DEEP], {}, {"a": None}, {"": {}}, {"a": DEEP}, {"5": "x"},
        {"type": "x"}, {"id": 5},
    ]
)  # fmt: skip

SAMPLING = {
    "max_new_tokens": INTEGERS, "min_new_tokens": INTEGERS, "n": INTEGERS, "top_k": INTEGERS, "beam_width": INTEGERS,
    "temperature": NUMBERS, "top_p": NUMBERS, "min_p": NUMBERS, "repetition_penalty": NUMBERS,
    "frequency_penalty": NUMBERS, "presence_penalty": NUMBERS, "stop": TEXTS, "stop_regex": TEXTS, "regex": TEXTS,
    "ebnf": TEXTS, "json_schema": TEXTS, "structural_tag": TEXTS, "stop_token_ids": [[5], [-1], [10**6]],
    "logit_bias": [{"5": 1}, {"-1": 1}, {"5": 1e300}], "ignore_eos": [True],
    "skip_special_tokens": [False], "no_stop_trim": [True], "sampling_seed": INTEGERS,
    "stream_interval": INTEGERS, "custom_params": [{"cache_boundaries": [1]}, {"cache_boundaries": [99]}, {"a": DEEP}],
    "is_normalized": [True], "stop_strs": ["a"], "nonsense": [1],
}  # fmt: skip
"""What SGLang's document calls an object of anything."""


def value_of(document: Document, schema: Document, depth: int = 0) -> st.SearchStrategy[Json]:
    """A value that the schema allows, with the numbers and texts that break things among its own."""
    if "$ref" in schema:
        return value_of(document, document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], depth)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return st.one_of(*(value_of(document, each, depth) for each in schema[key]))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        inside = value_of(document, schema.get("items", {}), depth + 1)
        return st.lists(inside, max_size=2) if depth < 4 else st.just([])
    if kind == "object":
        return object_of(document, schema, depth) if depth < 4 else st.just({})
    known = {"integer": INTEGERS, "number": NUMBERS, "string": TEXTS, "boolean": [True, False], "null": [None]}
    return st.sampled_from(known[kind]) if kind in known else hostile


def object_of(document: Document, schema: Document, depth: int = 0) -> st.SearchStrategy[Json]:
    """The required properties of an object and up to three others."""
    properties = schema.get("properties", {})
    if not properties:
        return sampling()
    required = {name: value_of(document, properties[name], depth + 1) for name in schema.get("required", ())}
    others = [name for name in properties if name not in required]

    def filled(chosen: list[str]) -> st.SearchStrategy[Json]:
        return st.fixed_dictionaries(
            {**required, **{name: value_of(document, properties[name], depth + 1) for name in chosen}}
        )

    return (st.lists(st.sampled_from(others), max_size=3, unique=True) if others else st.just([])).flatmap(filled)


@st.composite
def sampling(draw: st.DrawFn) -> Json:
    """Sampling parameters: up to three, each with a value of its kind or any other."""
    names = draw(st.lists(st.sampled_from(sorted(SAMPLING)), max_size=3, unique=True))
    return {"max_new_tokens": 2} | {name: draw(st.sampled_from(SAMPLING[name]) | hostile) for name in names}


@st.composite
def changed(draw: st.DrawFn, document: Document, schema: Document, base: dict[str, Json]) -> Json:
    """`base`, a right body, with one to three properties replaced by something the schema allows, or by anything."""
    properties = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"]
    names = draw(st.lists(st.sampled_from(sorted(properties)), min_size=1, max_size=3, unique=True))
    made = dict(base)
    for name in names:
        made[name] = draw(value_of(document, properties[name], 1) | hostile)
    return made


def body_of(document: Document, schema: Document, base: dict[str, Json]) -> st.SearchStrategy[Json]:
    """Mostly a right body with changes; sometimes one made of the schema alone, or no object at all."""
    near = changed(document, schema, base)
    short = {"max_tokens": base["max_tokens"]} if "max_tokens" in base else {}
    far = value_of(document, schema).map(lambda made: {**short, **made} if isinstance(made, dict) else made)
    return st.one_of(near, near, near, far, hostile)
