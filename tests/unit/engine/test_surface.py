"""The list of what is used of SGLang is complete, nothing in it is unused, and the installed version has all of it."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import defaultdict

import pytest

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import disaggregation
from sglang_hybrid.engine.surface import check
from sglang_hybrid.engine.surface.hooks import HOOKS, REPLACED
from sglang_hybrid.engine.surface.rows import ASSIGNED, IMPORT, NAME, PRIVATE, SUBCLASS, Use, full_name
from sglang_hybrid.engine.surface.uses import USES
from tests.unit.engine import surface_scan as scan

NOT_SGLANG = {"_replace", "_actions", "_exit", "_Popen", "_bootstrap"}
"""Of named tuples, argparse, os and multiprocessing."""

SOURCES = scan.sources()
OWNERS = [owner for owner in SOURCES if not owner.startswith("surface.") or owner == "surface.registration"]


ABSENT: set[str] = set()
"""Modules that are not loaded with the installed SGLang: what they are for is refused with it."""


@pytest.fixture(scope="module", autouse=True)
def whole_package() -> None:
    """Every module is imported, so that each class knows who extends it."""
    for owner in SOURCES:
        if owner in ("launch_server", "bench_serving"):
            continue
        try:
            importlib.import_module("sglang_hybrid.engine" + ("." + owner if owner else ""))
        except ImportError:
            if is_served(owner):
                raise
            ABSENT.add(owner)


def is_served(owner: str) -> bool:
    """Whether the installed SGLang is to have all that a module imports."""
    version, refused = compat.engine_version(), () if compat.complete() else ("elastic", "segments")
    mine = (row for row in USES if owner in row.owners.split() and row.kind in (IMPORT, SUBCLASS))
    return all(row.holds(version) and row.when not in refused for row in mine)


def listed(owner: str, *kinds: str) -> set[str]:
    return {full_name(row.target) for row in USES if owner in row.owners.split() and row.kind in kinds}


def dotted(target: str) -> str:
    return target.replace(":", ".")


@pytest.mark.parametrize("owner", OWNERS)
def test_what_a_module_uses_is_listed_and_what_is_listed_is_used(owner: str) -> None:
    if owner in ABSENT:
        pytest.skip(f"not loaded with SGLang {compat.engine_version()}")
    tree = SOURCES[owner]
    assert scan.imports(tree) == listed(owner, IMPORT, SUBCLASS)
    assert scan.bases(tree) == listed(owner, SUBCLASS)
    assert scan.names(tree) == listed(owner, NAME)
    assert {dotted(name) for name in scan.assigned(tree)} == {dotted(name) for name in listed(owner, ASSIGNED)}
    private = {name.rpartition(".")[2].rpartition(":")[2] for name in listed(owner, PRIVATE)}
    assert scan.private(owner, tree) - NOT_SGLANG == private


def test_hooks_are_registered_and_names_replaced_from_the_list_alone() -> None:
    for owner, tree in SOURCES.items():
        calls = scan.calls(tree)
        assert owner == "surface.registration" or "HookRegistry.register" not in calls, owner
        assert owner == "surface.registration" or not calls & {"setattr(module)", "setattr(holder)"}, owner


def test_every_function_of_the_list_is_ours() -> None:
    functions = [hook.function for hook in HOOKS] + [row.value for row in REPLACED]
    for function in functions:
        owner, _, name = function.partition(":")
        if owner in ABSENT:
            continue
        assert hasattr(importlib.import_module(f"sglang_hybrid.engine.{owner}"), name), function
    assert {row.owners for row in USES if not set(row.owners.split()) <= set(SOURCES)} == set()


def has_private(target: str) -> bool:
    """Whether a private name is in SGLang: an attribute, or in the source of the class whose objects have it."""
    if check.exists(target):
        return True
    owner, _, name = target.rpartition(".")
    return check.exists(owner) and re.search(rf"\b{name}\b", inspect.getsource(check.resolve(owner))) is not None


@pytest.mark.parametrize(
    "when",
    [
        "",
        "cpu",
        "elastic",
        "segments",
        "replicas",
        *(
            pytest.param(engine, marks=pytest.mark.skipif(disaggregation.missing(engine) is not None, reason="absent"))
            for engine in ("mooncake", "nixl")
        ),
    ],
)
def test_the_installed_version_has_what_is_listed_for_it(when: str) -> None:
    version = compat.engine_version()
    if when in ("elastic", "segments") and not compat.complete():
        return  # refused before the start
    gone = defaultdict(list)
    for row in check.rows(version, when):
        optional = getattr(row, "absent", False) or not getattr(row, "required", True)
        there = has_private(row.target) if isinstance(row, Use) and row.kind == PRIVATE else check.exists(row.target)
        if not there and not optional:
            gone[type(row).__name__].append(row.target)
    assert gone == {}


def test_a_row_holds_from_its_first_version_up_to_its_last() -> None:
    row = Use("srt.x:y", IMPORT, "compat", "every", since="0.5.18", before="0.5.21")
    assert [row.holds(version) for version in ("0.5.17", "0.5.18", "0.5.20.post1", "0.5.21")] == [
        False,
        True,
        True,
        False,
    ]
