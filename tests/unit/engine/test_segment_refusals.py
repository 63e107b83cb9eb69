"""What segments cannot be served with, before a model is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.models import find_model
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.segments import refusals

MODEL = find_model("qwen3-next-80b-a3b")


def asked(**given: object) -> SimpleNamespace:
    return SimpleNamespace(disaggregation_mode="null", kv_cache_dtype="auto", model_path="m", **given)


@pytest.mark.parametrize("memory", ["static", "elastic"])
def test_tensor_parallel_ranks_have_the_same_entries(memory: str) -> None:
    for ranks in (1, 2):
        refusals.check(asked(tp_size=ranks), HybridConfig(segments="on", memory=memory), MODEL)
    with pytest.raises(ConfigError, match=r"only tensor-parallel ones agree about entries; .*: --dp-size 2"):
        refusals.check(asked(tp_size=2, dp_size=2), HybridConfig(segments="on", memory=memory), MODEL)


def test_other_versions_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in compat.COMPLETE:
        monkeypatch.setattr(compat, "engine_version", lambda version=version: version)
        refusals.check(asked(), HybridConfig(segments="on"), MODEL)
    monkeypatch.setattr(compat, "engine_version", lambda: "0.5.22")
    with pytest.raises(ConfigError, match=r"0\.5\.21 and 0\.5\.23 only; .* drop --hybrid-segments: 0\.5\.22"):
        refusals.check(asked(), HybridConfig(segments="on"), MODEL)
