"""Servers of pairs where the transfer engine is missing or broken: one line with the remedy, before anything starts."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.launch import disaggregation, doctor, early
from tests.unit.engine.test_doctor_packages import in_broken

NO_LIBRARY = ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--disaggregation-mode", "prefill"],
        ["serve", "--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake_tcp"],
        ["cluster", "--prefill", "1", "--decode", "1", "--model-path", "x", "--", "--device", "cpu"],
    ],
)
def test_it_is_missing(command: list[str]) -> None:
    status, _, error = in_broken("mooncake", "missing", "wheel", *command)
    assert status == 2
    assert "pip install --no-deps mooncake-transfer-engine" in error.splitlines()[-1]


def test_doctor_tells_of_it_and_finds_no_fault() -> None:
    _, shown, _ = in_broken("mooncake", "missing", "wheel", "doctor")
    (line,) = [line for line in shown.splitlines() if "transfer engine" in line]
    assert line.startswith("ok")
    assert "none; prefill/decode pairs need one: run pip install --no-deps mooncake" in line


def test_a_library_that_it_links_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: Any) -> None:
        raise NO_LIBRARY

    monkeypatch.setattr(disaggregation, "importlib", SimpleNamespace(import_module=refuse))
    with pytest.raises(ConfigError, match="apt-get install -y libibverbs1"):
        disaggregation.require("mooncake_tcp")
    finding = doctor._transfer()
    assert "apt-get install -y libibverbs1" in str(finding.problem)
    disaggregation.require("fake")


def test_the_environment_of_a_server_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregation, "missing", lambda: None)
    monkeypatch.setattr(os, "environ", {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "900"})
    whole = early.read(["--model-path", "x"])
    disaggregation.prepare(whole)
    assert len(os.environ) == 1
    disaggregation.prepare(early.read(["--disaggregation-mode", "decode"]))
    assert os.environ["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] == "60"
    assert os.environ["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "900", "the user's own stays"
    assert os.environ["SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES"] == "1"


def test_ports_are_told_of() -> None:
    assert disaggregation.note(SimpleNamespace(disaggregation_mode="null")) is None
    assert "all addresses" in str(disaggregation.note(SimpleNamespace(disaggregation_mode="prefill")))
