"""The embedded models that simulated servers load: their weights are not used, their shapes are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hybrid.demo import model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a demo model by preset name, built once."""
    root = tmp_path_factory.mktemp("models")
    return lambda preset: model.build(root / preset, preset)
