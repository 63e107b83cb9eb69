"""What each line of a request log may hold. The limits lie beyond what servers write and within what decisions take."""

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.policies import find
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.reuse.classes import PRIORS
from sglang_hybrid.prefix.reuse.hints import Hints

LINE_BYTES = 1 << 26
"""No line is longer: six million tokens."""

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_SECONDS = 1e15
_COST = 1e30

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


class Damage(ValueError):
    """What is wrong with a line, the value last."""

    def __init__(self, what: str, value: object) -> None:
        super().__init__(f"{what}: {_short.repr(value)}")


class Field(NamedTuple):
    """One value of a line: its name, what it is in words, and whether a value is that."""

    name: str
    expected: str
    holds: Callable[[Any], bool]


def _whole(name: str, low: int = 0, high: int = _INT32) -> Field:
    return Field(name, f"a whole number from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def _wholes(name: str, low: int = 0) -> Field:
    def holds(value: Any) -> bool:
        if type(value) is not list or not value:
            return type(value) is list
        return set(map(type, value)) == {int} and low <= min(value) and max(value) <= _INT32

    return Field(name, f"a list of whole numbers from {low} to {_INT32}", holds)


def _number(name: str, low: float, high: float) -> Field:
    return Field(name, f"a number from {low:g} to {high:g}", lambda v: type(v) in (int, float) and low <= v <= high)


def _choice(name: str, choices: Iterable[str]) -> Field:
    known = tuple(choices)
    return Field(name, f"one of {', '.join(known)}", lambda v: type(v) is str and v in known)


def _text(name: str) -> Field:
    return Field(name, "a string", lambda v: type(v) is str)


def _flag(name: str) -> Field:
    return Field(name, "true or false", lambda v: type(v) is bool)


def _is_policy(value: Any) -> bool:
    try:
        return type(value) is str and find(value) is not None
    except ConfigError:
        return False


def _or_null(field: Field) -> Field:
    return Field(field.name, f"{field.expected}, or null", lambda v: v is None or field.holds(v))


_REQUEST = _text("request")
_NOW = _number("s", -_SECONDS, _SECONDS)
_NAMESPACE = _whole("namespace", 0, _INT64)
_TOKENS = _wholes("tokens")
_POOL = _choice("pool", [pool.value for pool in PoolKind])
_ID = _whole("id", -_INT64, _INT64)
_CANDIDATE = (
    _ID, _whole("end_tokens"), _whole("base_tokens"), _whole("parent_tokens"), _whole("freed_kv_tokens"),
    _whole("states", 0, 1), _whole("children"), _number("last_s", -_SECONDS, _SECONDS), _whole("touch", 0, _INT64),
    _whole("hits", 0, _INT64), _flag("superseded"), _whole("reuse_class", 0, len(PRIORS) - 1),
)  # fmt: skip


def _is_segments(value: Any) -> bool:
    return type(value) is list and all(
        type(each) is list and len(each) == 3 and set(map(type, each)) == {int}
        and 0 <= each[0] < each[1] <= _INT32 and 0 <= each[2] <= _INT64
        for each in value
    )  # fmt: skip


def _is_hints(value: Any) -> bool:
    if type(value) is not list or not value:
        return type(value) is list
    return len(value) == len(Hints._fields) and type(value[0]) is bool and all(map(_SAID.holds, value[1:]))


_SAID = _number("hint", -1.0, _SECONDS)
_HINTS = Field("hints", "an empty list or true or false and two numbers of seconds", _is_hints)

_SEGMENTS = Field("segments", "a list of starts, ends behind them, and names", _is_segments)

LINES: Mapping[str, tuple[Field, ...]] = {
    "arrive": (
        _REQUEST, _NOW, _NAMESPACE, _whole("cached"), _whole("kv"), _whole("limit", 0, _INT64),
        _wholes("boundaries", 1), _TOKENS, _wholes("positions"), _whole("seen"), _HINTS,
    ),
    "segments": (_REQUEST, _SEGMENTS),
    "resumed": (_REQUEST, _whole("position", 1)),
    "computed": (_REQUEST,),
    "finish": (_REQUEST, _NOW, _whole("length"), _TOKENS, _whole("kept")),
    "saved": (_REQUEST, _wholes("positions", 1)),
    "fit": (_whole("states", 0, _INT64), _whole("tokens", 0, _INT64), _whole("bytes", 0, _INT64)),
    "flushed": (),
    "put": (_POOL, *_CANDIDATE),
    "discard": (_POOL, _ID),
    "victim": (_POOL, _NOW, _or_null(_ID), _number("alpha", 0.0, _COST)),
    "seed": (_NOW, _NAMESPACE, _TOKENS),
    "full": (),
}  # fmt: skip
"""The kinds of lines after the first, and what follows the kind."""

_COSTS = (
    _text("name"),
    _whole("kv_bytes_per_token", 0, _INT64),
    _whole("checkpoint_bytes", 0, _INT64),
    _number("flops_per_token", 0.0, _COST),
    _number("flops_per_token_pair", 0.0, _COST),
    _whole("context_tokens"),
)
COSTS = tuple(field.name for field in _COSTS)
"""What of a ModelSpec decides anything."""

SHAPE = ("states", "kv_tokens", "step", "chunk_tokens", "buffers", "track_tokens", "page", "pass_states")
"""What a simulated server is made from (`sim.shape.Shape`). The first two are 0 with a budget, and where it cannot be
made; logs of earlier versions have 0 for all of them then."""

SLOTS_PER_PASS = 3
"""Free slots that SGLang wants for each request of a pass before 0.5.22: `MAMBA_STATE_PER_REQ_PREFIX_CACHE`. Logs did
not say it before version 9."""

BUDGET = ("budget_bytes", "granule_bytes", "kv_row_bytes", "kv_planes", "state_bytes", "request_states")
"""What elastic memory is made from (`memory.sizing`); all 0 where there are two pools of fixed size."""

SETTINGS: tuple[Field, ...] = (
    Field("policy", "the name of a policy", _is_policy), _whole("grid", 1), _flag("guarded"), *_COSTS,
    *(_whole(name) for name in SHAPE), *(_whole(name, 0, _INT64) for name in BUDGET),
)  # fmt: skip
"""What the first line says of the server."""


def parsed(raw: bytes) -> list[Any]:
    """The JSON array in `raw`; raises Damage."""
    if len(raw) > LINE_BYTES:
        raise Damage(f"no line is longer than {LINE_BYTES} bytes", raw[:60])
    try:
        line = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Damage(f"a line is UTF-8 text ({error.reason} at byte {error.start})", raw[:60]) from error
    except json.JSONDecodeError as error:
        raise Damage(f"a line is a JSON array ({error.msg} at character {error.pos})", raw[:60]) from error
    except (ValueError, RecursionError) as error:
        raise Damage("no line has numbers of thousands of digits or lists in lists in lists", raw[:60]) from error
    if not isinstance(line, list):
        raise Damage("a line is a JSON array", line)
    return line


def check_line(line: list[Any]) -> None:
    """Raise Damage unless `line`, which is not the first, is of a known kind and its values are what that kind has."""
    kind = line[0] if line else None
    fields = LINES.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise Damage(f"a line begins with one of {', '.join(LINES)}", kind)
    if len(line) != len(fields) + 1:
        raise Damage(f"{kind!r} is followed by {len(fields)} values", line)
    for field, value in zip(fields, line[1:], strict=True):
        _check(field, value)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise Damage unless `settings` are those of a server; unknown ones are another version's."""
    for field in SETTINGS:
        if field.name not in settings:
            raise Damage("the settings of the server lack one", field.name)
        _check(field, settings[field.name])
    if len(settings) != len(SETTINGS):
        raise Damage("unknown settings", sorted(set(settings) - {field.name for field in SETTINGS}))


def _check(field: Field, value: Any) -> None:
    if not field.holds(value):
        raise Damage(f"{field.name} must be {field.expected}", value)
