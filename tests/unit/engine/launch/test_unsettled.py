"""States that SGLang would cache a token late: the launcher chooses how, and what nobody chose for is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.served import ARCHITECTURES, Saves, Where
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache import build
from sglang_hybrid.engine.launch import flags, preparation
from tests.engine.configs import QWEN3_NEXT, write
from tests.versions import since

CODESTRAL = {**PUBLISHED["mamba-codestral-7b"], "architectures": ["Mamba2ForCausalLM"]}
ADDED = ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")


def complete(folder: Path, *more: str) -> tuple[list[str], list[str]]:
    """The arguments that the launcher adds, and the notes."""
    rest = ["--model-path", str(folder), *more]
    final, notes = preparation.complete(flags.parse_engine(rest), rest, HybridConfig())
    return final[len(rest) :], [note for note in notes if "overlap" in note]


@since("0.5.21", "this model")
def test_passes_of_a_model_that_sglang_does_not_name_do_not_overlap(tmp_path: Path, on_a_gpu: None) -> None:
    folder = write(tmp_path, CODESTRAL)
    added, notes = complete(folder)
    assert [each for each in added if each in ADDED] == ADDED
    assert len(notes) == 1
    assert "strategy for the states of Mamba2ForCausalLM" in notes[0]
    assert not set(ADDED) & set(complete(folder, "--disable-radix-cache")[0])
    assert complete(folder, "--disable-overlap-schedule")[0].count("--disable-overlap-schedule") == 0


def test_others_are_left_to_sglang(tmp_path: Path, on_a_gpu: None) -> None:
    added, notes = complete(write(tmp_path, QWEN3_NEXT))
    assert not set(ADDED) & set(added)
    assert not notes


def context(buffered: bool, overlaps: bool) -> Any:
    return SimpleNamespace(
        disable_radix_cache=False, is_hybrid_ssm=True, enable_hierarchical_cache=False,
        params=SimpleNamespace(enable_mamba_extra_buffer=buffered),
        server_args=SimpleNamespace(disable_overlap_schedule=not overlaps, disaggregation_mode="null"),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=["OfTheHub"])),
    )  # fmt: skip


@pytest.mark.parametrize(("buffered", "overlaps"), [(False, True), (False, False), (True, True)])
def test_no_cache_is_built_that_would_be_a_token_late(
    monkeypatch: pytest.MonkeyPatch, buffered: bool, overlaps: bool
) -> None:
    from sglang_hybrid.engine.cache import radix_cache

    made: Any = SimpleNamespace(coordinator=None)
    monkeypatch.setattr(compat, "resolved", lambda args: args)
    monkeypatch.setattr(radix_cache, "create", lambda ctx, make: made)
    monkeypatch.setattr(build.hooks, "activate", lambda coordinator: None)
    spec: Any = SimpleNamespace(checkpoint_bytes=1)
    if buffered or not overlaps:
        assert build.build(context(buffered, overlaps), HybridConfig(), spec) is made
        return
    with pytest.raises(ConfigError, match=r"add --mamba-radix-cache-strategy no_buffer --disable-.*: OfTheHub$"):
        build.build(context(buffered, overlaps), HybridConfig(), spec)


@since("0.5.21", "some of these models")
def test_the_list_is_what_sglang_names() -> None:
    """By its own names of models for which it chooses a strategy."""
    from sglang.srt.arg_groups.overrides import _MAMBA_RADIX_CACHE_ARCHS
    from sglang.srt.configs import gigachat35  # registers itself
    from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_spec_by_arch

    assert gigachat35
    for name, row in ARCHITECTURES.items():
        newer = "from SGLang 0.5.23" in row.note and not compat.at_least("0.5.23")
        if row.where is Where.SPEC or row.saves in (Saves.STOCK, Saves.NONE) or newer:
            continue
        named = name in _MAMBA_RADIX_CACHE_ARCHS or get_linear_attn_spec_by_arch(name) is not None
        if name != "GraniteMoeHybridForCausalLM":  # by its layers
            assert row.settled == named, name
