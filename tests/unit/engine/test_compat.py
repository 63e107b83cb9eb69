"""Version skew is one clear error at start."""

import importlib.metadata

import pytest

from sglang_hybrid.core.errors import IncompatibleEngine
from sglang_hybrid.engine import backend, compat


def test_the_installed_engine_is_supported() -> None:
    assert compat.check_engine() == importlib.metadata.version("sglang")


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0", "1.0", "unknown"])
def test_a_version_outside_the_range_is_refused(version: str) -> None:
    with pytest.raises(IncompatibleEngine, match=rf"install sglang==0\.5\.21: found {version}"):
        compat.check_version(version)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.21", "0.5.21.post1", "0.5.23"])
def test_a_version_inside_the_range_is_accepted(version: str) -> None:
    compat.check_version(version)


def test_a_missing_door_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    doors = ("sglang.srt.plugins:load_plugins", "sglang.srt.plugins:load_dreams", "sglang.gone:door")
    assert compat.missing_doors(doors) == ["sglang.srt.plugins:load_dreams", "sglang.gone:door"]
    monkeypatch.setattr(compat, "DOORS", doors)
    with pytest.raises(IncompatibleEngine, match="load_dreams"):
        compat.check_engine()


def test_a_hook_that_did_not_take_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    backend.verify_hooks()
    monkeypatch.setattr(backend, "_required_hooks", ["sglang.srt.nowhere.function"])
    with pytest.raises(IncompatibleEngine, match=r"sglang\.srt\.nowhere\.function"):
        backend.verify_hooks()
