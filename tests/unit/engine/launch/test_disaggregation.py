"""Servers of pairs where the transfer engine is missing or broken: one line with the remedy, before anything starts."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.doctor import installation
from sglang_hybrid.engine.launch import disaggregation, early
from sglang_hybrid.engine.pairs import nixl
from tests.unit.engine.doctor.test_doctor_packages import in_broken

ON_CPU = {"UCX_TLS": "tcp,self"}
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
    assert "no mooncake, which prefill/decode pairs need unless told otherwise: run pip install --no-deps moonc" in line


def test_a_library_that_it_links_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: Any) -> None:
        raise NO_LIBRARY

    monkeypatch.setattr(disaggregation, "importlib", SimpleNamespace(import_module=refuse))
    with pytest.raises(ConfigError, match="apt-get install -y libibverbs1"):
        disaggregation.require("mooncake_tcp")
    with pytest.raises(ConfigError, match=r"NIXL, .* run pip install --no-deps --force-reinstall nixl==1.5.1"):
        disaggregation.require("nixl")
    finding = installation._transfer()
    assert "apt-get install -y libibverbs1" in str(finding.problem)
    disaggregation.require("fake")


def test_the_environment_of_a_server_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregation, "missing", lambda _: None)
    monkeypatch.setattr(os, "environ", {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "900"})
    whole = early.read(["--model-path", "x"])
    disaggregation.prepare(whole, [])
    assert len(os.environ) == 1
    disaggregation.prepare(early.read(["--disaggregation-mode", "decode"]), [])
    assert os.environ["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] == "60"
    assert os.environ["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "900", "the user's own stays"
    assert os.environ["SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES"] == "1"
    assert disaggregation.features() == ["mooncake"]


@pytest.mark.parametrize(
    ("given", "environment", "told"),
    [
        ([], {}, "127.0.0.1"),
        (["--host", "localhost"], {}, "127.0.0.1"),
        (["--host", "10.0.0.7"], {}, "10.0.0.7"),
        (["--host", "::1"], {}, "::1"),
        (["--host", "0.0.0.0"], {}, None),
        (["--host", "::"], {}, None),
        (["--host", "server-0"], {}, None),
        (["--host", "10.0.0.7"], {disaggregation.ADDRESS: "10.1.0.7"}, "10.1.0.7"),
        (["--host", "10.0.0.7"], {"HOST_IP": "10.1.0.7"}, None),
    ],
)
def test_schedulers_listen_where_the_server_does(
    given: list[str], environment: dict[str, str], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disaggregation, "missing", lambda _: None)
    monkeypatch.setattr(os, "environ", dict(environment))
    disaggregation.prepare(early.read(["--disaggregation-mode", "prefill", *given]), [])
    assert os.environ.get(disaggregation.ADDRESS) == told


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--device", "cpu"], {**ON_CPU, "UCX_NET_DEVICES": "lo"}),
        (["--device", "cpu", "--host", "10.0.0.7"], ON_CPU),
        (["--device", "cuda"], {}),
    ],
)
def test_the_environment_of_nixl(given: list[str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregation, "missing", lambda _: None)
    monkeypatch.setattr(os, "environ", {})
    given = ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl", *given]
    disaggregation.prepare(early.read(given), given)
    more = set(disaggregation.ENVIRONMENT) | {disaggregation.ADDRESS, disaggregation.ENGINE}
    assert {name: value for name, value in os.environ.items() if name not in more} == expected
    assert disaggregation.features() == [], "in memory of a GPU there is nothing to tell NIXL"
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    assert disaggregation.features() == ["nixl"]


def noted(backend: str, mode: str = "prefill") -> str | None:
    return disaggregation.note(SimpleNamespace(disaggregation_mode=mode, disaggregation_transfer_backend=backend))


def test_ports_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert noted("mooncake", "null") is None
    assert noted("fake", "decode") is None
    assert "all addresses, whatever --host is, on two ports from 15000 to 17000" in str(noted("mooncake"))
    assert "on every interface; UCX_NET_DEVICES" in str(noted("nixl"))
    monkeypatch.setattr(
        os, "environ", {"MC_MIN_RPC_PORT": "20000", "MC_MAX_PRC_PORT": "20010", "UCX_NET_DEVICES": "lo"}
    )
    assert "two ports from 20000 to 20010" in str(noted("mooncake_tcp"))
    assert noted("nixl") is None, "it listens where it was asked to"


def test_nixl_is_told_that_all_memory_is_the_hosts() -> None:
    agent = object()
    args, kwargs = nixl.host_memory(agent, [(1, 2, 0)], "VRAM", mem_type="VRAM", backends=["VRAM"])
    assert args == (agent, [(1, 2, 0)], "DRAM")
    assert kwargs == {"mem_type": "DRAM", "backends": ["VRAM"]}
    assert nixl.host_memory(agent, "descs") == ((agent, "descs"), {})
