"""Typed reading of a Hugging Face model configuration: every problem is a ConfigError that names the key."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from sglang_hybrid.core.errors import ConfigError

_T = TypeVar("_T")


def load_mapping(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """`source` itself if it is a mapping, else the content of a config.json or of the one in a model folder."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"pass a model folder or a config.json that can be read ({error.strerror}): {path}") from None
    except ValueError as error:
        raise ConfigError(f"not a valid JSON file, download the model again ({error}): {path}") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"a model configuration must be a JSON object, not a {type(content).__name__}: {path}")
    return content


class ConfigReader:
    """A configuration with a name for messages; each method takes a key and its aliases, first match wins.

    A key that is absent or null falls back to `default`; without a default that is a ConfigError.
    """

    def __init__(self, config: Mapping[str, Any], architecture: str) -> None:
        self.config = config
        self.architecture = architecture

    def value(self, *keys: str) -> Any:
        """The first non-null value among `keys`, or None."""
        return next((self.config[key] for key in keys if self.config.get(key) is not None), None)

    def count(self, *keys: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer >= `minimum`."""
        value = self.value(*keys)
        if value is None:
            if default is None:
                raise self._missing(*keys)
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.wrong(keys[0], f"an integer of at least {minimum}", value)
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.value(*keys)
        if value is None:
            if default is None:
                raise self._missing(*keys)
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(keys[0], "a number above zero", value)
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        """A boolean."""
        return self._typed(bool, "true or false", keys, default)

    def text(self, *keys: str, default: str) -> str:
        """A string."""
        return self._typed(str, "a string", keys, default)

    def _typed(self, kind: type[_T], what: str, keys: tuple[str, ...], default: _T) -> _T:
        value = self.value(*keys)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.wrong(keys[0], what, value)
        return value

    def items(self, *keys: str, of: type) -> list[Any] | None:
        """A list whose elements are all of one type, or None if no key is there."""
        value = self.value(*keys)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, of) for item in value):
            raise self.wrong(keys[0], f"a list of {of.__name__}", value)
        return list(value)

    def nested(self, key: str) -> "ConfigReader":
        """The reader of a sub-configuration."""
        value = self.value(key)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a mapping", value)
        return ConfigReader(value, f"{self.architecture}.{key}")

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigReader":
        """The same configuration where absent keys, and only those, have a value from `defaults`."""
        return ConfigReader({**defaults, **self.config}, self.architecture)

    def wrong(self, key: str, expected: str, value: object) -> ConfigError:
        """The error for a key whose value has the wrong form."""
        return ConfigError(f"config of {self.architecture}: {key} must be {expected}: {value!r}")

    def _missing(self, *keys: str) -> ConfigError:
        return ConfigError(f"config of {self.architecture}: add the missing key {' or '.join(keys)}")


def printable(name: object) -> str:
    """A file name as it can be printed: names are bytes, and may hold what a terminal obeys."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(name))
