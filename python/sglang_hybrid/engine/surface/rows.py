"""What a row of the list says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LAUNCHER, HTTP, SCHEDULER, CLIENT, EVERY = "launcher", "http", "scheduler", "client", "every"
"""The processes in which something is used."""

IMPORT, SUBCLASS, PRIVATE, ASSIGNED, NAME = "import", "subclass", "private", "assigned", "name"
"""What is done with it. `NAME`: only its name is used, to look it up."""

_OTHERS = ("fastapi.", "nixl.", "starlette.", "transformers.", "uvicorn.")


@dataclass(frozen=True, kw_only=True)
class _Versions:
    """The versions of SGLang in which something is used: from `since`, and up to but not including `before`."""

    since: str = "0.5.17"
    before: str = "0.5.24"

    def holds(self, version: str) -> bool:
        """Whether it is used with this version of SGLang."""
        return number(self.since) <= number(version) < number(self.before)


def number(version: str) -> tuple[int, ...]:
    """A version in an order: 0.5.9 is older than 0.5.17."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3])


def full_name(target: str) -> str:
    """A target with SGLang's name in front, where it is SGLang's."""
    return target if target.startswith(_OTHERS) else f"sglang.{target}"


@dataclass(frozen=True)
class Use(_Versions):
    """Something that modules import, subclass or reach."""

    target: str
    kind: str
    owners: str
    process: str
    when: str = ""


@dataclass(frozen=True)
class Hook(_Versions):
    """A function of SGLang's that one of ours runs before, after, around or in place of.

    Without one that is not `required`, a server starts all the same: mistakes of clients are then answered with 500.
    """

    target: str
    how: Literal["BEFORE", "AFTER", "AROUND", "REPLACE"]
    function: str
    process: str
    when: str = ""
    required: bool = True


@dataclass(frozen=True)
class Replaced(_Versions):
    """A name in one of SGLang's modules that is given our value; one that has to be `absent` only where it is."""

    target: str
    value: str
    process: str
    when: str
    absent: bool = False
