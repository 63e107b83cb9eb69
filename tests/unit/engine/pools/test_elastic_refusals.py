"""What elastic memory cannot serve is refused before anything starts, with the reason and the remedy."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import from_config, preset
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import arguments, flags, models
from sglang_hybrid.engine.pools import refusals
from tests.engine.configs import INDEX, LLAMA, QWEN3_NEXT, write
from tests.versions import served

pytestmark = served("elastic memory")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> models.Model:
    return inspected(tmp_path_factory.mktemp("models") / "hybrid", QWEN3_NEXT)


@pytest.fixture(scope="module")
def settings(model: models.Model) -> dict[str, Any]:
    """The settings of a server that elastic memory can serve."""
    rest = ["--model-path", model.path]
    parsed = arguments.complete(flags.parse_engine(rest), rest, HybridConfig(memory="elastic"), model)[1]
    return vars(parsed)


def inspected(folder: Path, config: dict[str, Any]) -> models.Model:
    return models.inspect_model(argparse.Namespace(model_path=str(write(folder, config)), load_format="auto"))


def refusal(settings: dict[str, Any], model: models.Model, *rest: str, **config: Any) -> str:
    configured = HybridConfig.from_mapping({"memory": "elastic", **config})
    with pytest.raises(ConfigError) as refused:
        refusals.check(argparse.Namespace(**settings), list(rest), configured, model, True)
    return str(refused.value)


def test_elastic_memory_asks_sglang_for_no_sizes(settings: dict[str, Any]) -> None:
    assert (settings["max_total_tokens"], settings["max_mamba_cache_size"]) == (None, None)
    assert (settings["mamba_radix_cache_strategy"], settings["max_running_requests"]) == ("extra_buffer", 16)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("max_total_tokens", 9000, "sizes from the budget"),
        ("max_mamba_cache_size", 40, "sizes from the budget"),
        ("disable_radix_cache", True, "the cache must be on"),
        ("enable_unified_memory", True, "unified pool"),
        ("enable_linear_replayssm", True, "replay rings"),
        ("enable_int8_mamba_checkpoint", True, "int8 checkpoints"),
        ("enable_memory_saver", True, "by itself"),
        ("enable_mixed_chunk", True, "inside a prefill"),
        ("speculative_algorithm", "EAGLE3", "NGRAM, NEXTN, EAGLE and STANDALONE only"),
        ("disaggregation_mode", "prefill", "PD registers"),
        ("pp_size", 2, "ranks"),
        ("kv_cache_dtype", "fp8_e4m3", "scaled KV"),
        ("mamba_radix_cache_strategy", "extra_buffer_lazy", "mid-decode"),
    ],
)
def test_settings_that_contradict_it(
    settings: dict[str, Any], model: models.Model, name: str, value: Any, reason: str
) -> None:
    said = refusal({**settings, name: value}, model)
    assert reason in said
    assert f"add --hybrid-memory static: --{name.replace('_', '-')}" in said


@pytest.mark.parametrize("beside", [{"ple_layer_ids": [1]}, INDEX])
def test_what_is_kept_beside_kv_and_states_has_no_place_in_its_pages(
    settings: dict[str, Any], model: models.Model, beside: dict[str, Any]
) -> None:
    spec = from_config({**QWEN3_NEXT, "model_type": "qwen4_exp", **beside})
    said = refusal(settings, replace(model, spec=spec))
    assert "have no place in its pages; change it or add --hybrid-memory static: " in said


@pytest.mark.parametrize("version", ["0.5.17", "0.5.22"])
def test_other_versions_of_sglang(
    settings: dict[str, Any], model: models.Model, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(compat, "engine_version", lambda: version)
    assert refusal(settings, model).endswith(
        f"it was run with SGLang 0.5.21 and 0.5.23 only; change it or add --hybrid-memory static: {version}"
    )


def test_a_host_tier_and_ranks_work_one_at_a_time(settings: dict[str, Any], model: models.Model) -> None:
    for one in ({"enable_hierarchical_cache": True}, {"tp_size": 2}):
        refusals.check(argparse.Namespace(**{**settings, **one}), [], HybridConfig(memory="elastic"), model, True)
    assert "one rank only" in refusal({**settings, "enable_hierarchical_cache": True, "tp_size": 2}, model)


HEAD = {"speculative_algorithm": "NEXTN"}


@pytest.mark.parametrize("algorithm", ["NEXTN", "EAGLE", "NGRAM", "ngram"])
@pytest.mark.parametrize("tier", [False, True])
def test_heads_and_n_grams_are_served(
    settings: dict[str, Any], model: models.Model, algorithm: str, tier: bool
) -> None:
    asked = settings | {"speculative_algorithm": algorithm}
    if tier:
        asked |= {"enable_hierarchical_cache": True}
    refusals.check(argparse.Namespace(**asked), [], HybridConfig(memory="elastic", cpu_memory_gb=20), model, True)


def test_the_head_itself_may_be_named(settings: dict[str, Any], model: models.Model) -> None:
    named = settings | HEAD | {"speculative_draft_model_path": model.path, "model_path": model.path}
    refusals.check(argparse.Namespace(**named), [], HybridConfig(memory="elastic", cpu_memory_gb=20), model, True)


@pytest.mark.parametrize(
    ("draft", "served"),
    [
        ({}, True),
        ({"num_key_value_heads": 2, "head_dim": 16}, True),
        ({"num_key_value_heads": 2}, False),
        (QWEN3_NEXT, False),
        (None, False),
    ],
    ids=["alike", "as large", "larger rows", "recurrent", "of the hub"],
)
def test_a_model_that_drafts_has_rows_as_large_as_the_target(
    settings: dict[str, Any], model: models.Model, tmp_path: Path, draft: dict[str, Any] | None, served: bool
) -> None:
    path = "somebody/draft" if draft is None else str(write(tmp_path / "draft", LLAMA | draft))
    asked = settings | {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": path}
    if served:
        refusals.check(argparse.Namespace(**asked), [], HybridConfig(memory="elastic", cpu_memory_gb=20), model, True)
        return
    said = refusal(asked, model, cpu_memory_gb=20)
    assert re.search(f"rows of KV as large as the model's, 64 bytes; .*draft-model-path {re.escape(path)}$", said)


def test_candidates_leave_too_little(settings: dict[str, Any], model: models.Model) -> None:
    """Of 17 requests, 4 states of 53,760 bytes each."""
    said = refusal(settings | HEAD, model, cpu_memory_gb=0.003)
    assert "3,655,680 bytes; lower --max-running-requests 16, or raise --hybrid-cpu-memory-gb: 0.003" in said
    assert "the budget does not hold one request" in refusal(settings | HEAD, model, cpu_memory_gb=0.0037)


def test_on_a_gpu_triton_verifies(settings: dict[str, Any], model: models.Model) -> None:
    """FlashInfer's verification, SGLang's choice beside its prefill, takes states for a block."""
    elastic, asked = HybridConfig(memory="elastic"), argparse.Namespace(**(settings | HEAD))
    assert refusals.defaults(asked, elastic, on_cpu=False) == {"linear_attn_verify_backend": "triton"}
    for others in (
        (asked, HybridConfig(), False),
        (asked, elastic, True),
        (argparse.Namespace(**settings), elastic, False),
    ):
        assert refusals.defaults(*others) == {}
    asked.linear_attn_verify_backend = "triton"
    refusals.check(asked, [], elastic, model, False)
    asked.linear_attn_verify_backend = "flashinfer"
    with pytest.raises(ConfigError, match=r"only Triton verifies .*: --linear-attn-verify-backend flashinfer"):
        refusals.check(asked, [], elastic, model, False)


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ({"linear_attn_decode_backend": "flashinfer", "linear_attn_prefill_backend": "flashinfer"}, ""),
        ({"linear_attn_decode_backend": "cutedsl"}, "--linear-attn-decode-backend cutedsl"),
        ({"linear_attn_prefill_backend": "cutedsl"}, "--linear-attn-prefill-backend cutedsl"),
        ({"linear_attn_backend": "cutedsl"}, "--linear-attn-backend cutedsl"),
        ({"mamba_backend": "flashinfer"}, "--mamba-backend flashinfer"),
    ],
)
def test_on_a_gpu_kernels_read_states_that_lie_apart(
    settings: dict[str, Any], model: models.Model, kernels: dict[str, Any], said: str
) -> None:
    """SGLang serves its own layout of this kind with the same ones only."""
    elastic, asked = HybridConfig(memory="elastic"), argparse.Namespace(**(settings | kernels))
    if not said:
        refusals.check(asked, [], elastic, model, False)
        return
    with pytest.raises(ConfigError, match=f"read.? states that lie apart; .*: {said}$"):
        refusals.check(asked, [], elastic, model, False)
    by_channel = replace(model, spec=preset("kimi-linear-48b-a3b"))
    if "mamba_backend" not in kernels:
        refusals.check(asked, [], elastic, by_channel, False)


@pytest.mark.parametrize("groups", [{"enable_dp_attention": True, "dp_size": 2}, {"attn_dp_size": 2}])
def test_groups_of_data_parallel_attention(
    settings: dict[str, Any], model: models.Model, groups: dict[str, Any]
) -> None:
    asked = settings | {"tp_size": 2} | groups
    refusals.check(argparse.Namespace(**asked), [], HybridConfig(memory="elastic"), model, True)
    assert refusal(asked | {"tp_size": 4}, model).endswith("--tp-size 4")


def test_there_is_no_ratio(settings: dict[str, Any], model: models.Model) -> None:
    assert "it has no ratio" in refusal(settings, model, "--mamba-full-memory-ratio=0.5")


@pytest.mark.parametrize(("key", "value"), [("backend", "stock"), ("policy", "lru")])
def test_it_needs_our_cache_and_its_prices(settings: dict[str, Any], model: models.Model, key: str, value: str) -> None:
    assert refusal(settings, model, **{key: value}).endswith(f"--hybrid-{key} {value}")


def test_it_needs_both_kinds_of_memory(settings: dict[str, Any], tmp_path: Path) -> None:
    said = refusal(settings, inspected(tmp_path / "llama", LLAMA))
    assert "not known to have both KV and recurrent states" in said


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lfm2-1.2b", "states that have a recurrent part and a window"),
        ("minicpm-sala", "states that have a recurrent part and a window"),
    ],
)
def test_states_and_kv_it_was_not_run_with(
    settings: dict[str, Any], model: models.Model, name: str, reason: str
) -> None:
    line = refusal(settings, replace(model, spec=preset(name)))
    assert re.search(f"{reason}; .*: {re.escape(model.path)}$", line), line


def test_latent_kv_is_served(settings: dict[str, Any], model: models.Model) -> None:
    latent = replace(model, spec=preset("kimi-linear-48b-a3b"))
    served = HybridConfig.from_mapping({"memory": "elastic", "cpu_memory_gb": 1.0})
    refusals.check(argparse.Namespace(**settings), [], served, latent, True)
    assert "--hybrid-cpu-memory-gb" in refusal(settings, latent, cpu_memory_gb=0.13)


@pytest.mark.parametrize("budget_gb", [0.0001, 0.0002])
def test_a_budget_too_small_for_one_request(settings: dict[str, Any], model: models.Model, budget_gb: float) -> None:
    assert "--hybrid-cpu-memory-gb" in refusal(settings, model, cpu_memory_gb=budget_gb)


def test_static_memory_allows_what_elastic_refuses(settings: dict[str, Any], model: models.Model) -> None:
    allowed = argparse.Namespace(**{**settings, "max_total_tokens": 9000})
    refusals.check(allowed, [], HybridConfig(), model, True)
