"""docs/models.md is what the code says, and the table behind it agrees with the costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hybrid.core.families import UNPRICED
from sglang_hybrid.core.layers import KINDS, LatentAttention
from sglang_hybrid.core.models_page import page
from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.served import ARCHITECTURES, Saves, Where
from sglang_hybrid.core.spec import preset

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
SHOWN = {name: row for name, row in ARCHITECTURES.items() if row.example}


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "write it again: python -m sglang_hybrid.core.models_page > docs/models.md"
    )


@pytest.mark.parametrize("name", SHOWN)
def test_a_row_has_the_layers_of_its_example(name: str) -> None:
    row = SHOWN[name]
    kept = [kind for kind in preset(row.example).layer_counts if kind not in ("mlp", "moe")]
    assert sorted(row.kinds) == sorted(kept)
    assert PUBLISHED[row.example]["model_type"] == row.model_type
    latent = any(isinstance(layer, LatentAttention) for layer in preset(row.example).layers)
    assert latent == ("latent" in row.note)


def test_what_a_cpu_computes() -> None:
    """The kinds of layers that engine/cpu provides."""
    for name, row in ARCHITECTURES.items():
        assert set(row.kinds) <= set(KINDS)
        if row.where is Where.CPU:
            assert set(row.kinds) <= {"attention", "conv", "gdn", "kda", "mamba2"}, name


def test_what_a_prefill_saves_goes_with_where_it_is_served() -> None:
    for name, row in ARCHITECTURES.items():
        assert (row.saves is Saves.STOCK) == (row.model_type in UNPRICED), name
        if row.where is Where.SPEC:
            assert row.saves is Saves.NONE, name


def test_the_page_names_every_architecture_and_reason() -> None:
    text = page()
    assert all(f"`{name}`" in text for name in ARCHITECTURES)
    shown = {row.model_type for row in ARCHITECTURES.values()}
    assert all(reason in text for model_type, reason in UNPRICED.items() if model_type in shown)
