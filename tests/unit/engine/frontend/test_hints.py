"""Hints as bodies and `custom_params` have them: what they mean, and which are none."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache.hints import KEY, hints_of, lifetime_s, named_hints, written
from sglang_hybrid.engine.frontend.marks.breakpoints import lifetimes, marked
from sglang_hybrid.engine.frontend.marks.hints import body_hints
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*Hints._fields, "x"]), inner, max_size=3)
    ),
)


@given(st.booleans(), st.floats(0, 1e9) | st.just(-1.0), st.floats(0, 1e9) | st.just(-1.0))
def test_what_is_written_is_read(final: bool, back: float, lifetime: float) -> None:
    hints = Hints(final, back, lifetime)
    assert named_hints({KEY: json.loads(json.dumps(written(hints)))}) == hints


@given(JSON)
def test_anything_else_is_refused_by_its_name(value: Any) -> None:
    hints, said = NO_HINTS, "cache_hints"
    try:
        hints = hints_of(value, "cache_hints")
    except ConfigError as error:
        said = str(error)
    assert said.startswith("cache_hints")
    assert len(said) < 200
    assert isinstance(hints.final, bool)
    assert all(seconds == -1.0 or 0 <= seconds <= 1e9 for seconds in hints[1:])


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -0.5, 10**400, True, "5", [5]])
def test_seconds_that_are_none(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"cache_hints\.back_in_s is a number of seconds"):
        hints_of({"back_in_s": seconds}, "cache_hints")


def test_lifetimes_as_services_write_them() -> None:
    assert [lifetime_s(text) for text in ("5m", "1h", "24h", "90s")] == [300.0, 3600.0, 86_400.0, 90.0]
    assert [lifetime_s(text) for text in ("0m", "m", "1d", "", None, 5, "99999999h")] == [None] * 6 + [1e9]


def test_the_longest_lifetime_of_a_body_counts() -> None:
    def part(ttl: str | None) -> dict[str, Any]:
        return {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}}

    body: dict[str, Any] = {"messages": [{"role": "user", "content": [part("5m"), part("1h"), part(None)]}]}
    assert body_hints(body, lifetimes(body, marked(body))) == Hints(lifetime_s=3600.0)
    kept = {**body, "prompt_cache_retention": "24h"}
    assert body_hints(kept, lifetimes(kept, marked(kept))).lifetime_s == 86_400.0
    said = {**kept, "cache_hints": {"lifetime_s": 7}}
    assert body_hints(said, lifetimes(said, marked(said))).lifetime_s == 7.0
    silent: dict[str, Any] = {"messages": [{"role": "user", "content": [part(None)]}], "prompt_cache_key": "k"}
    assert body_hints(silent, lifetimes(silent, marked(silent))) == NO_HINTS
    options = {**silent, "prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}
    assert body_hints(options, []) == Hints(lifetime_s=1800.0)
    assert body_hints({**silent, "prompt_cache_options": {"mode": "implicit"}}, []) == NO_HINTS
    whole = {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "messages": [{"role": "user", "content": "a"}]}
    assert body_hints(whole, lifetimes(whole, marked(whole)), anthropic=True).lifetime_s == 3600.0
