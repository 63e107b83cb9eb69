"""Version skew is one clear error at start."""

import importlib.metadata

import pytest

from sglang_hybrid.core.errors import IncompatibleEngine
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.surface import check, registration
from sglang_hybrid.engine.surface.rows import EVERY, IMPORT, Use


def test_the_installed_engine_is_supported() -> None:
    assert compat.check_engine() == importlib.metadata.version("sglang")


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0", "1.0", "unknown"])
def test_a_version_outside_the_range_is_refused(version: str) -> None:
    with pytest.raises(IncompatibleEngine, match=rf"install sglang==0\.5\.21: found {version}"):
        compat.check_version(version)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.21", "0.5.21.post1", "0.5.23"])
def test_a_version_inside_the_range_is_accepted(version: str) -> None:
    compat.check_version(version)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = ("srt.plugins:load_plugins", "srt.plugins:load_dreams", "gone:name")
    assert check.missing(targets) == ["sglang.srt.plugins:load_dreams", "sglang.gone:name"]
    monkeypatch.setattr(check, "USES", tuple(Use(target, IMPORT, "cache.build", EVERY) for target in targets))
    with pytest.raises(IncompatibleEngine, match="load_dreams"):
        compat.check_engine()


def test_a_hook_that_did_not_take_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    registration.verify()
    monkeypatch.setattr(registration, "_required", ["sglang.srt.nowhere.function"])
    with pytest.raises(IncompatibleEngine, match=r"sglang\.srt\.nowhere\.function"):
        registration.verify()
