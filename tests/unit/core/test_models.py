"""Models by name: presets, hub names, folders, and what is suggested for a name that is none of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.models import HUB_NAMES, find_model
from sglang_hybrid.core.spec import PRESETS


def test_a_model_is_found_by_each_of_its_names() -> None:
    for name, preset in HUB_NAMES.items():
        assert find_model(name) is find_model(name.upper()) is PRESETS[preset]
    for name in PRESETS:
        assert find_model(name) is PRESETS[name]
    assert set(HUB_NAMES.values()) == set(PRESETS) - {"marconi-7b"}  # a model of a paper, on no hub


def test_what_is_on_the_disk_comes_before_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen" / "Qwen3.5-27B"
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "vocab_size": 100}))
    monkeypatch.chdir(tmp_path)
    assert find_model("Qwen/Qwen3.5-27B").checkpoint_bytes == 0


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("qwen3-next-80b", "qwen3-next-80b-a3b"),
        ("Qwen/Qwen3-Next-80B-A3B-Instuct", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
        ("someone/falcon-h1-7B", "falcon-h1-7b"),
        ("xyz", "the presets are falcon-"),
    ],
)
def test_near_names_are_suggested(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=suggestion.replace(".", r"\.")) as caught:
        find_model(name)
    assert str(caught.value).endswith(f": {name}")
