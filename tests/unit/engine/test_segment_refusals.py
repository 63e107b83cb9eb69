"""What segments cannot be served with, before a model is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.models import find_model
from sglang_hybrid.engine.segments import refusals

MODEL = find_model("qwen3-next-80b-a3b")


def asked(**given: object) -> SimpleNamespace:
    return SimpleNamespace(disaggregation_mode="null", kv_cache_dtype="auto", model_path="m", **given)


def test_elastic_memory_is_shared_on_one_rank() -> None:
    refusals.check(asked(tp_size=1), HybridConfig(segments="on", memory="elastic"), MODEL)
    refusals.check(asked(tp_size=2), HybridConfig(segments="on"), MODEL)
    with pytest.raises(ConfigError, match=r"run on one rank only; change it or drop --hybrid-segments: --tp-size 2"):
        refusals.check(asked(tp_size=2), HybridConfig(segments="on", memory="elastic"), MODEL)
