"""Two folders have one fingerprint if they hold one model, whatever they are called."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.launch import fingerprint

CONFIG: dict[str, Any] = {
    "architectures": ["A"],
    "hidden_size": 8,
    "_name_or_path": "here",
    "transformers_version": "4",
}


def folder(place: Path, weights: bytes = b"w" * 300_000, name: str = "model.safetensors") -> Path:
    place.mkdir()
    (place / name).write_bytes(weights)
    (place / "README.md").write_text(place.name)
    return place


def test_a_copy_has_the_same(tmp_path: Path) -> None:
    found = fingerprint.of(folder(tmp_path / "a"), CONFIG)
    copied = {"hidden_size": 8, "architectures": ["A"], "_name_or_path": "there", "transformers_version": "5"}
    assert fingerprint.of(folder(tmp_path / "b"), copied) == found
    assert len(found) == 16


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ({**CONFIG, "hidden_size": 16}, b"w" * 300_000),
        (CONFIG, b"w" * 300_001),
        (CONFIG, b"v" + b"w" * 299_999),
        (CONFIG, b"w" * 299_999 + b"v"),
    ],
)
def test_another_model_has_another(tmp_path: Path, config: dict[str, Any], weights: bytes) -> None:
    assert fingerprint.of(folder(tmp_path / "b", weights), config) != fingerprint.of(folder(tmp_path / "a"), CONFIG)


def test_the_launcher_leaves_it_for_the_server(tmp_path: Path) -> None:
    made = folder(tmp_path / "a")
    fingerprint.leave(str(made), CONFIG, SimpleNamespace())
    assert os.environ[fingerprint.ENVIRONMENT_KEY] == fingerprint.of(made, CONFIG)
    fingerprint.leave("of/the-hub", None, SimpleNamespace())
    assert fingerprint.ENVIRONMENT_KEY not in os.environ, "not known before it is fetched"


def test_how_weights_are_quantized_is_left_too() -> None:
    """An FP8 reading of a bfloat16 checkpoint has the checkpoint's fingerprint, and other KV."""
    left = []
    for quantization in (None, "fp8"):
        fingerprint.leave("of/the-hub", None, SimpleNamespace(quantization=quantization))
        left.append(os.environ[fingerprint.QUANTIZED_KEY])
    assert left[0] != left[1]
