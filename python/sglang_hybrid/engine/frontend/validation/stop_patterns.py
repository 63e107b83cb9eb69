"""What a stop pattern may cost: SGLang's scheduler searches each with Python's backtracking `re` after every token.

`(a+)+b` over sixty letters `a` takes longer than a server lives. This module bounds the steps that a search can take
from one position of the text before the request is taken, and the tail of the text that SGLang searches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.validation.limits import PATTERN, STOP_SPAN, STOP_STEPS, STOPS, shown

_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_LOOKS = (_constants.ASSERT, _constants.ASSERT_NOT)


def span(tokens: int, pattern: str) -> int:
    """The tokens at the end of an answer that SGLang searches; for a repeat without an end it would be all of them."""
    return tokens if tokens <= STOP_STEPS else STOP_SPAN


def require_cheap(patterns: str | Sequence[str]) -> None:
    """Raise ConfigError unless all patterns of a request together take at most `STOP_STEPS` from one position."""
    given = [patterns] if isinstance(patterns, str) else patterns
    if len(given) > STOPS:
        raise ConfigError(f"stop_regex has at most {STOPS} patterns: {len(given)}")
    if sum(map(steps, given)) > STOP_STEPS:
        raise ConfigError(
            f"stop_regex can take more than {STOP_STEPS} steps at one position; write {{0,32}} in place of * and "
            f"{{1,32}} of +, or use fewer alternatives: {shown(patterns)}"
        )


def steps(pattern: str) -> int:
    """Upper bound on the characters that a search compares from one position; a repeat without an end counts as
    `STOP_SPAN`. Raises ConfigError for what is no pattern."""
    if len(pattern) > PATTERN:
        raise ConfigError(f"a stop_regex has at most {PATTERN} characters: {len(pattern)}")
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"stop_regex is no regular expression ({error}): {shown(pattern)}") from error
    *first, last = list(parsed) or [(_constants.AT, None)]
    paths, compared = _sequence(first, pattern)
    operation, value = last
    if operation in _REPEATS and value[1] is _constants.MAXREPEAT:
        # Nothing follows that could fail, so repeats beyond the first are taken once, on the path that ends the search.
        least, _, inner = value
        _, needed = _repeated(max(least, 1), max(least, 1), inner, pattern)
        return _capped(compared + paths * needed + STOP_SPAN * _sequence(inner, pattern)[1])
    return _capped(compared + paths * _one(operation, value, pattern)[1])


def _sequence(items: Any, pattern: str) -> tuple[int, int]:
    """Paths through a sequence of parsed items, and the characters compared on all of them."""
    paths, compared = 1, 0
    for operation, value in items:
        more, each = _one(operation, value, pattern)
        paths, compared = _capped(paths * more), _capped(compared + paths * each)
    return paths, compared


def _one(operation: Any, value: Any, pattern: str) -> tuple[int, int]:
    if operation in _REPEATS:
        return _repeated(*value, pattern)
    if operation is _constants.SUBPATTERN:
        return _sequence(value[-1], pattern)
    if operation is _constants.ATOMIC_GROUP:
        return _sequence(value, pattern)
    if operation in _LOOKS:
        return _sequence(value[1], pattern)
    if operation is _constants.BRANCH:
        branches = [_sequence(branch, pattern) for branch in value[1]]
        return _capped(sum(paths for paths, _ in branches)), _capped(sum(compared for _, compared in branches))
    if operation in (_constants.GROUPREF, _constants.GROUPREF_EXISTS):
        raise ConfigError(f"stop_regex takes no references to groups: {shown(pattern)}")
    return 1, 0 if operation is _constants.AT else 1


def _repeated(least: int, most: Any, inner: Any, pattern: str) -> tuple[int, int]:
    if most is _constants.MAXREPEAT:
        most = least + STOP_SPAN
    paths, compared = _sequence(inner, pattern)
    if paths == 1:
        return _capped(most - least + 1), _capped(most * compared)
    ends, reached, total = 0, 1, 0  # `reached`: paths through the repeats so far
    for done in range(most + 1):
        ends = _capped(ends + reached) if done >= least else ends
        total = _capped(total + reached * compared) if done < most else total
        if reached > STOP_STEPS:
            return STOP_STEPS + 1, STOP_STEPS + 1
        reached = _capped(reached * paths)
    return ends, total


def _capped(count: int) -> int:
    """`count`, or a number beyond the limit: exact ones would have thousands of digits."""
    return min(count, STOP_STEPS + 1)
