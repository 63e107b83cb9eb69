"""Of several HTTP workers one is asked for an update of weights, and all say afterwards what is served."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.frontend import endpoints
from sglang_hybrid.engine.frontend.server import identity, workers

OLD = {"model_path": "old", "served_model_name": "chat", "load_format": "auto", "weight_version": "default"}
NEW = {"model_path": "new", "served_model_name": "new", "load_format": "auto", "weight_version": "step 7"}


class Manager:
    """What SGLang's keeps itself, and what it keeps in its configuration."""

    def __init__(self) -> None:
        self.model_path, self.served_model_name = OLD["model_path"], OLD["served_model_name"]
        self.configured = {name: OLD[name] for name in ("load_format", "weight_version")}

    def config_value(self, name: str) -> Any:
        return self.configured[name] if name in self.configured else getattr(self, name)

    def record_config_updates(self, source: str, **fields: Any) -> None:
        self.configured.update(fields)

    def update(self) -> None:
        self.model_path, self.served_model_name = NEW["model_path"], NEW["served_model_name"]
        self.record_config_updates("update", weight_version=NEW["weight_version"])

    def said(self) -> dict[str, Any]:
        return {name: self.config_value(name) for name in OLD}


def worker(path: str) -> tuple[identity.Board, Manager]:
    manager = Manager()
    return identity.Board(path, manager), manager


def test_all_workers_name_the_new_weights() -> None:
    path = identity.make()
    (asked, first), (other, second) = worker(path), worker(path)
    for board in (asked, other):
        board.adopt()
        board.publish()
    assert first.said() == second.said() == OLD
    first.update()
    asked.publish()
    other.publish()  # a long request that began before the update
    other.adopt()
    assert second.said() == NEW
    late, third = worker(path)  # one that was started anew
    late.adopt()
    assert third.said() == NEW
    third.record_config_updates("update", weight_version="8")  # shorter than what the board has
    late.publish()
    asked.adopt()
    assert first.said() == {**NEW, "weight_version": "8"}


def test_an_update_is_told_before_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    path = identity.make()
    other, second = worker(path)
    monkeypatch.setattr(identity, "path", path)
    monkeypatch.setattr(identity, "_board", None)
    first = Manager()
    assert identity.join(None, first) is None

    async def update(**_: Any) -> str:
        first.update()
        return "done"

    assert asyncio.run(endpoints.call(update, dependant=SimpleNamespace(call=update))) == "done"
    other.adopt()
    assert second.said() == NEW


def test_a_worker_opens_the_board_that_comes_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "path", "")
    monkeypatch.setattr(identity, "_board", None)
    (_, _, info), _ = workers.leave("port", "server", {})
    pickle.loads(pickle.dumps(info))
    identity.join(None, Manager())
    assert isinstance(identity._board, identity.Board)


def test_without_a_board_a_worker_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(identity, "path", "/proc/0/fd/0")
    monkeypatch.setattr(identity, "_board", None)
    identity.join(None, Manager())
    assert "may name the old ones" in caplog.text
    with identity.shared():
        assert identity._board is None
