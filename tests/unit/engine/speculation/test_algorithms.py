"""What of SGLang's speculative algorithms is refused before a model loads, and how many tokens each verifies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec, from_config
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import flags, models
from sglang_hybrid.engine.speculation import algorithms, checks
from tests.engine.configs import LLAMA, QWEN3_NEXT, write

DRAFT = "--speculative-draft-model-path"
EAGLE3 = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": QWEN3_NEXT["hidden_size"]}
NEWEST = compat.COMPLETE[-1]


def asked(folder: Path, algorithm: str, *more: str, config: dict[str, Any] = QWEN3_NEXT) -> tuple[Any, models.Model]:
    path = str(write(folder / "model", config))
    rest = ["--model-path", path, "--device", "cuda", "--speculative-algorithm", algorithm]
    return flags.parse_engine([*rest, *more]), models.Model(path, config, from_config(config))


def refusal(folder: Path, algorithm: str, *more: str, on_cpu: bool = False, architecture: str = "") -> str:
    """What the launcher says; empty if it refuses nothing."""
    namespace, model = asked(folder, algorithm, *more)
    if architecture:
        model = replace(model, config={**QWEN3_NEXT, "architectures": [architecture]})
    try:
        algorithms.check(namespace, model, on_cpu)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK", "uno"])
def test_what_only_a_gpu_computes(tmp_path: Path, algorithm: str) -> None:
    said = refusal(tmp_path, algorithm, on_cpu=True)
    assert "on a GPU only; use NEXTN" in said
    assert said.endswith(f"--speculative-algorithm {algorithm}")
    namespace, model = asked(tmp_path, algorithm, config=LLAMA)
    algorithms.check(namespace, model, on_cpu=False)


@pytest.mark.parametrize(
    ("algorithm", "more", "remedy", "value"),
    [
        ("UNO", (), "answers would be wrong; use NEXTN", "-algorithm UNO"),
        ("NONE", (), "drop the flag", "-algorithm NONE"),
        ("FROZEN_KV_MTP", (), "use NEXTN", "-algorithm FROZEN_KV_MTP"),
        ("NEXTN", ("--enable-multi-layer-eagle",), "drop", "--enable-multi-layer-eagle"),
        ("NEXTN", ("--decoupled-spec-role", "verifier"), "drop", "-role verifier"),
    ],
)
def test_what_serves_no_hybrid_model(
    tmp_path: Path, algorithm: str, more: tuple[str, ...], remedy: str, value: str
) -> None:
    said = refusal(tmp_path, algorithm, *more)
    assert remedy in said
    assert said.endswith(value)


def test_what_does_not(tmp_path: Path) -> None:
    assert refusal(tmp_path, "DFLASH") == refusal(tmp_path, "DSPARK") == ""
    assert refusal(tmp_path, "NGRAM", "--enable-multi-layer-eagle") == "", "n-grams take no notice of it"
    assert refusal(tmp_path, "EAGLE", "--enable-multi-layer-eagle", architecture="GigaChat35ForCausalLM") == ""
    namespace, model = asked(tmp_path, "FROZEN_KV_MTP", config=LLAMA)
    algorithms.check(namespace, model, on_cpu=False)


@pytest.mark.parametrize(
    ("architecture", "version", "served"),
    [
        ("Qwen3NextForCausalLM", "0.5.17", True),
        ("Qwen3_5ForCausalLM", "0.5.21", False),
        ("Qwen3_5MoeForConditionalGeneration", "0.5.21", False),
        ("Qwen3_5ForCausalLM", "0.5.22", True),
        ("KimiLinearForCausalLM", NEWEST, False),
        ("NemotronHForCausalLM", NEWEST, False),
    ],
)
def test_targets_of_eagle_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, version: str, served: bool
) -> None:
    monkeypatch.setattr(compat, "engine_version", lambda: version)
    more = (DRAFT, str(write(tmp_path / "draft", EAGLE3)))
    said = refusal(tmp_path, "EAGLE3", *more, architecture=architecture)
    assert ("hands" not in said) == served
    assert served or f"{architecture} to a draft" in said


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({}, ""),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, ""),
        ({"architectures": ["Qwen3ForCausalLM"]}, "no draft of EAGLE-3 but a Qwen3ForCausalLM"),
        ({"hidden_size": 7}, "hidden states of 7 numbers"),
        ({"hidden_size": 7, "target_hidden_size": QWEN3_NEXT["hidden_size"]}, ""),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, QWEN3_NEXT["num_hidden_layers"] - 1]}},
            f"hands them out is {QWEN3_NEXT['num_hidden_layers'] - 2}",
        ),
    ],
)
def test_drafts_of_eagle_3(tmp_path: Path, changed: dict[str, Any], remedy: str) -> None:
    draft = write(tmp_path / "draft", {**EAGLE3, **changed})
    said = refusal(tmp_path, "EAGLE3", DRAFT, str(draft))
    assert remedy in said
    assert bool(said) == bool(remedy)
    assert not said or said.endswith(f"{DRAFT} {draft}")


@pytest.mark.parametrize(
    ("algorithm", "config", "more", "tokens"),
    [
        ("DFLASH", {}, (), 16),
        ("DFLASH", {"block_size": 24}, (), 24),
        ("DFLASH", {"block_size": 24, "dflash_config": {"block_size": 12}}, (), 12),
        ("DFLASH", {"block_size": 24}, ("--speculative-dflash-block-size", "10"), 10),
        ("DSPARK", {}, (), 8),
        ("DSPARK", {"block_size": 5}, (), 6),
        ("DSPARK", {"block_size": 5, "dspark_block_size": 9}, (), 10),
        ("DSPARK", {"block_size": 5}, ("--speculative-dspark-block-size", "3"), 4),
        ("NEXTN", {}, (), 4),
        ("NEXTN", {}, ("--speculative-adaptive",), 8),
        ("NEXTN", {}, ("--speculative-adaptive", "--speculative-num-steps", "1"), 8),
        ("NEXTN", {}, ("--speculative-adaptive", "--speculative-adaptive-config", "{table}"), 12),
        ("NGRAM", {}, ("--speculative-adaptive",), 12),
    ],
)
def test_tokens_of_a_verification(
    tmp_path: Path, algorithm: str, config: dict[str, Any], more: tuple[str, ...], tokens: int
) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"1": {"candidate_steps": [2, 11]}, "8": {"candidate_steps": [0]}, "note": 1}))
    draft = (DRAFT, str(write(tmp_path / "draft", {**LLAMA, **config})))
    namespace, _ = asked(tmp_path, algorithm, *draft, *(flag.format(table=table) for flag in more))
    assert checks.draft_tokens(namespace) == tokens


@pytest.mark.parametrize("text", [None, "no JSON", "[]", '{"1": {}}'])
def test_a_table_of_steps_that_is_none(tmp_path: Path, text: str | None) -> None:
    table = tmp_path / "table.json"
    if text is not None:
        table.write_text(text)
    namespace, _ = asked(tmp_path, "NEXTN", "--speculative-adaptive", "--speculative-adaptive-config", str(table))
    with pytest.raises(ConfigError, match="table of steps") as caught:
        checks.draft_tokens(namespace)
    assert str(caught.value).endswith(str(table))


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_replayed_states_of_a_block(tmp_path: Path, algorithm: str) -> None:
    """Their workers hand Kimi delta attention's ring to its commit, and to others a buffer that is not there."""
    namespace, model = asked(tmp_path, algorithm, "--enable-linear-replayssm-spec")
    with pytest.raises(ConfigError, match="drop --enable-linear-replayssm-spec"):
        checks.check(namespace, model.spec)
    checks.check(namespace, cast(ModelSpec, SimpleNamespace(is_recurrent=True, layer_counts={"kda": 3})))
