"""Version skew is one clear error at start."""

import importlib.metadata
import inspect
from collections.abc import Callable
from types import SimpleNamespace

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


@pytest.mark.parametrize("version", ["0.5.17", "0.5.21", "0.5.21.post1", "0.5.22", "0.5.23"])
def test_a_version_inside_the_range_is_accepted(version: str) -> None:
    compat.check_version(version)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23"])
def test_newer_versions_want_no_number_of_slots_for_a_pass(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And have none to import: a server of such a version would not start."""
    assert [target for target in check.required(version) if "MAMBA_STATE_PER_REQ" in target] == []
    monkeypatch.setattr(compat, "engine_version", lambda: version)
    assert compat.pass_states(lazy=False) == compat.pass_states(lazy=True) == 0


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


def test_two_hooks_around_one_place_are_one_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would log a warning at the start of every server with elastic memory."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered: list[tuple[str, str]] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, _, how: registered.append((target, how.name)))
    monkeypatch.setattr(registration, "_required", [])
    registration.register(["", "elastic", "segments"])
    around = [target for target, how in registered if how == "AROUND"]
    assert len(around) == len(set(around)) > 20

    def first(original: Callable[[int], int], number: int, *, more: int) -> int:
        return original(number + more) * 2

    def second(original: Callable[..., int], number: int, *, more: int) -> int:
        return original(number, more=more) + 1

    assert registration._outside(first, second)(lambda number: number, 5, more=2) == 15, "the later one is outside"


def test_a_request_says_the_same_before_and_after_its_fields_were_renamed() -> None:
    older = SimpleNamespace(prefix_indices=[7, 8, 9], extend_range=SimpleNamespace(start=3, end=5))
    newer = SimpleNamespace(prefix_len=3, extend_end=5)
    for req in (older, newer):
        assert (compat.prefix_tokens(req), compat.pass_end(req)) == (3, 5)
    for match in (SimpleNamespace(device_indices=[7, 8]), SimpleNamespace(device_prefix_len=2)):
        assert compat.matched_tokens(match) == 2


def test_requests_and_matches_of_the_installed_engine_have_these_fields() -> None:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult

    written = inspect.getsource(Req)
    assert "self.prefix_len:" in written or "self.prefix_indices:" in written
    assert "self.extend_end:" in written or "self.extend_range:" in written
    assert {"device_prefix_len", "device_indices"} & set(MatchResult._fields)


def test_a_batch_of_some_requests_has_a_plan_of_its_own_where_locations_are_planned() -> None:
    bound = []
    plan = SimpleNamespace(bind=lambda batch, translator: bound.append((batch, translator)))
    runner = SimpleNamespace(kv_index_translator=SimpleNamespace(own_plan=lambda _: plan))
    compat.plan_locations(SimpleNamespace(), runner)
    compat.plan_locations(SimpleNamespace(kv_loc_plan=None), runner)
    assert not bound
    batch = SimpleNamespace(kv_loc_plan=object())
    compat.plan_locations(batch, runner)
    assert bound == [(batch, runner.kv_index_translator)]
