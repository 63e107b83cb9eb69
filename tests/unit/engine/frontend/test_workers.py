"""An HTTP worker proves its hooks before it serves, and so does the process that starts it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from sglang_hybrid.core.errors import IncompatibleEngine
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.frontend.server import identity, workers
from sglang_hybrid.engine.surface import registration
from sglang_hybrid.engine.surface.hooks import HOOKS
from sglang_hybrid.engine.surface.rows import EVERY, HTTP, SCHEDULER, full_name


def test_whoever_takes_the_arguments_proves_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    (port, server, info), named = workers.leave("port", "server", {"startup_time": 1})
    assert (port, server, named) == ("port", "server", {})
    sent = pickle.dumps(info)
    assert pickle.loads(sent)[workers.KEY] == len(registration._required) > 20
    monkeypatch.setattr(registration, "_required", [*registration._required, "sglang.srt.nowhere.function"])
    with pytest.raises(IncompatibleEngine, match=r"sglang\.srt\.nowhere\.function"):
        pickle.loads(sent)
    with pytest.raises(IncompatibleEngine, match=r"sglang\.srt\.nowhere\.function"):
        workers.leave("port", "server", {})


def test_a_process_without_plugins_has_proved_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_required", [])
    with pytest.raises(IncompatibleEngine, match=r"SGLANG_PLUGINS name sglang_hybrid.* no plugin was loaded"):
        workers.enter(identity.make())


def test_sglang_hands_its_workers_what_the_hook_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import multi_tokenizer_mixin

    written: list[Any] = []

    class Memory:
        def close(self) -> None: ...

    monkeypatch.setattr(
        multi_tokenizer_mixin, "write_to_shared_memory", lambda args, _: written.append(args) or Memory()
    )
    multi_tokenizer_mixin.write_data_for_multi_tokenizer("port", "server", {"startup_time": 1})
    assert isinstance(written[0][2][workers.KEY], workers.Passport)


def test_every_process_gets_every_hook() -> None:
    here = [hook for hook in HOOKS if not hook.when and hook.required and hook.holds(compat.engine_version())]
    always = {full_name(hook.target).replace(":", ".") for hook in here}
    assert {hook.process for hook in HOOKS if not hook.when} == {EVERY, HTTP, SCHEDULER}
    assert always <= set(registration._required)
