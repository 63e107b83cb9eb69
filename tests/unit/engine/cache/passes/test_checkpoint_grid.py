"""The grid on which SGLang saves states of multimodal models is one on which their kernel has them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine import compat


@pytest.mark.skipif(not compat.at_least("0.5.21"), reason="asked otherwise of older versions of SGLang")
def test_chunk_of_the_text_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import overrides
    from sglang.srt.configs.nano_nemotron_vl import NemotronH_Omni_Reasoning_V3_Config
    from sglang.srt.utils.hf_transformers.common import get_hf_text_config

    from sglang_hybrid.engine.cache.passes.prefill_states import whole_chunks

    text = {"chunk_size": 128, "hidden_size": 64, "num_attention_heads": 2, "hybrid_override_pattern": "M*"}
    vision = {"args": {"model": "vit_huge_patch16_224"}, "auto_map": {}, "preferred_resolution": [512, 512]}
    config = NemotronH_Omni_Reasoning_V3_Config(
        llm_config={**text, "num_key_value_heads": 1, "num_hidden_layers": 2},
        vision_config={**vision, "patch_size": 16, "version": "v"},
    )
    model = SimpleNamespace(hf_config=config, hf_text_config=get_hf_text_config(config))
    assert model.hf_text_config.mamba_chunk_size == 128
    monkeypatch.setattr(overrides, "model_config_of", lambda _: model)
    monkeypatch.setattr(overrides, "resolved_view", lambda given: given)
    kernel: Any = SimpleNamespace(CHUNK_SIZE=64)  # its module needs a GPU
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.attention.fla.chunk_delta_h", kernel)
    original: Any = getattr(overrides.mamba_cache_chunk_size, "__wrapped__", overrides.mamba_cache_chunk_size)

    for page, grid in ((1, 128), (64, 128), (256, 256)):
        arguments = SimpleNamespace(page_size=page)
        assert original(arguments) == max(page, 64)  # what SGLang makes of it
        assert whole_chunks(original, arguments) == grid
    model.hf_text_config = SimpleNamespace()
    assert whole_chunks(original, SimpleNamespace(page_size=32)) == 64


@pytest.mark.skipif(not compat.at_least("0.5.21"), reason="older versions save at the interval itself")
def test_a_growing_answer_is_saved_where_interval_and_grid_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "checkpoint_grid", lambda: 64)
    asked = [(256, 1), (64, 64), (96, 32), (256, 128), (0, 1)]
    assert [compat.track_tokens(*each) for each in asked] == [256, 64, 192, 256, 0]
