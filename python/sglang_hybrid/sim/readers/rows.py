"""One row of a trace file, typed access to its values, so that every complaint can say where."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sglang_hybrid.sim.trace import TraceError


@dataclass(frozen=True)
class Row:
    """One JSON object of a trace file and where it stands."""

    where: str
    fields: dict[str, Any]

    def integer(self, key: str, least: int = 0) -> int:
        """The integer under `key`, at least `least`; raises TraceError."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TraceError(f"{self.where}: {key} must be an integer, got {value!r}")
        if value < least:
            raise TraceError(f"{self.where}: {key} must be at least {least}, got {value}")
        return value

    def number(self, key: str) -> float:
        """The number under `key`; raises TraceError."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TraceError(f"{self.where}: {key} must be a number, got {value!r}")
        try:
            return float(value)
        except OverflowError as error:
            raise TraceError(f"{self.where}: {key} must be a number of ordinary size: {error}") from error

    def items(self, key: str) -> list[Any]:
        """The list under `key`; raises TraceError."""
        value = self._get(key)
        if not isinstance(value, list):
            raise TraceError(f"{self.where}: {key} must be a list, got {type(value).__name__}")
        return value

    def seconds(self, key: str) -> float:
        """The time under `key`, seconds or ISO 8601 text, in seconds; raises TraceError."""
        value = self._get(key)
        if not isinstance(value, str):
            return self.number(key)
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError) as error:
            raise TraceError(f"{self.where}: {key} must be seconds or ISO 8601, got {value!r}") from error

    def text(self, key: str, default: str) -> str:
        """The value under `key` as text, or `default` when it is missing or null."""
        value = self.fields.get(key)
        return default if value is None else str(value)

    def _get(self, key: str) -> Any:
        if key not in self.fields:
            raise TraceError(f"{self.where}: the row lacks a key: {key}")
        return self.fields[key]
