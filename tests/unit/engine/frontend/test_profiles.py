"""Profiles: what SGLang's scheduler would end on, in the middle of others' requests, is refused or costs a trace."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend import endpoints
from sglang_hybrid.engine.frontend.admin import profiles


def asked(**given: Any) -> SimpleNamespace:
    usual = dict.fromkeys(("output_dir", "num_steps", "start_step", "activities", "profile_id", "profile_prefix"))
    return SimpleNamespace(**{**usual, "profile_by_stage": False, **given})


@pytest.mark.parametrize(
    ("given", "on_cpu", "said"),
    [
        ({"profile_by_stage": True}, False, "profile_by_stage needs num_steps"),
        ({"profile_by_stage": True, "num_steps": 3}, True, "together, with num_steps: profile_by_stage true"),
        ({"num_steps": 0}, True, "num_steps is 1 or more, or left out: 0"),
        ({"start_step": -1}, True, "start_step is 1 or more, or left out: -1"),
        ({"activities": ["MEM"]}, True, "activities here are of CPU, GPU: 'MEM'"),
        ({"activities": ["GPU"]}, True, "activities name what is recorded"),
        ({"activities": []}, False, "activities name what is recorded"),
        ({"activities": ["cpu"]}, False, "CUDA_PROFILER, RPD, XPU: 'cpu'"),
        ({"profile_id": "a/b"}, True, "put folders into output_dir: 'a/b'"),
        ({"output_dir": "/proc/none"}, True, "name another output_dir: '/proc/none'"),
        ({"output_dir": __file__}, True, "name another output_dir: "),
    ],
)
def test_what_cannot_be_made_is_refused(
    given: dict[str, Any], on_cpu: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", str(int(on_cpu)))
    with pytest.raises(ConfigError, match=said):
        profiles.check(None, asked(**given))


def test_what_can_be_made_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    profiles.check(None)
    folder = tmp_path / "traces"
    profiles.check(None, asked(output_dir=str(folder), num_steps=3, activities=["CPU"]))
    assert folder.is_dir()
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    profiles.check(None, asked(output_dir=str(folder), activities=["MEM"], profile_by_stage=True, num_steps=1))


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("stop_profile_async", RuntimeError("Call /start_profile first."), "Call /start_profile first."),
        (
            "update_weights_from_tensor",
            AssertionError("dp_size must be 1"),
            "/update_weights_from_disk: dp_size must be 1",
        ),
        ("remove_external_corpus", AttributeError("'list' has no get"), 'an object, {"corpus_id": ...}'),
        ("generate", ValueError("too long"), "too long"),
    ],
)
def test_a_mistake_of_an_administrator_is_a_400(name: str, error: Exception, said: str) -> None:
    async def endpoint(**_: Any) -> None:
        raise error

    def of(name: str) -> SimpleNamespace:
        return SimpleNamespace(call=SimpleNamespace(__name__=name))

    with pytest.raises(HTTPException) as caught:
        asyncio.run(endpoints.call(endpoint, dependant=of(name)))
    assert caught.value.status_code == 400
    assert said in caught.value.detail
    if not isinstance(error, ValueError):
        with pytest.raises(type(error)):
            asyncio.run(endpoints.call(endpoint, dependant=of("generate")))
