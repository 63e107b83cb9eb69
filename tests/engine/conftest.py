"""Real servers, one per configuration, shared by the tests that need it; and the transformers reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from sglang_hybrid.engine import compat
from tests.engine.composition import Composition
from tests.engine.support import PATIENCE_S, Client, Reference

REFUSED: dict[str, str | None] = {}
"""Flags with which a server is refused before the start by what is installed, and their values, None for any."""
if not compat.complete():
    REFUSED |= {"--hybrid-segments": "on", "--hybrid-memory": "elastic", "--speculative-algorithm": None}
if not compat.at_least("0.5.21"):
    REFUSED["--hybrid-state-events"] = "published"


@pytest.fixture(scope="session")
def references(models: Callable[[str], Path]) -> Callable[[str], Reference]:
    loaded: dict[str, Reference] = {}

    def load(preset: str) -> Reference:
        if preset not in loaded:
            loaded[preset] = Reference(models(preset))
        return loaded[preset]

    return load


@pytest.fixture(scope="session")
def compositions(models: Callable[[str], Path]) -> Callable[[str], Composition]:
    """Composed prefill by its definition, of a reader or of Kimi-Linear ("kda")."""
    made: dict[str, Composition] = {}

    def get(preset: str) -> Composition:
        if preset not in made:
            made[preset] = Composition(preset if preset in model.READERS else models(preset))
        return made[preset]

    return get


@pytest.fixture(scope="session")
def serve(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Client]]:
    """A ready server for (preset, flags), started on first use; the same request gets the same server."""
    running: dict[tuple[str, ...], Client] = {}
    logs = tmp_path_factory.mktemp("logs")

    def get(preset: str, *flags: str) -> Client:
        key = (preset, *flags)
        if any(flag in REFUSED and REFUSED[flag] in (None, value) for flag, value in pairwise(flags)):
            pytest.skip("refused before the start with this SGLang")
        client = running.pop(key, None)
        if client is None:
            if len(running) >= 4:  # over a gigabyte each; the one asked for longest ago goes
                running.pop(next(iter(running))).server.stop()
            server = Server(models(preset), flags, log=logs / f"{len(list(logs.iterdir()))}.log")
            server.wait_ready(PATIENCE_S)
            client = Client(server)
        running[key] = client
        return client

    yield get
    for client in running.values():
        client.server.stop()
