"""What is refused of speculation with hybrid models, and what is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import arguments, cpu_profile, flags, models
from sglang_hybrid.engine.speculation import checks, drafts
from tests.engine.configs import LFM2, LLAMA, QWEN3_NEXT, write

NGRAM = ("--speculative-algorithm", "NGRAM")
EAGLE = ("--speculative-algorithm", "EAGLE")


@pytest.fixture(autouse=True)
def primary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions are refused on a CPU before anything else is asked."""
    monkeypatch.setattr(compat, "engine_version", lambda: compat.PRIMARY)


def check(folder: Path, *more: str, config: object = QWEN3_NEXT) -> None:
    namespace = flags.parse_engine(["--model-path", str(write(folder / "model", config)), "--device", "cuda", *more])
    checks.check(namespace, models.inspect_model(namespace).spec)


@pytest.mark.parametrize(
    ("more", "remedy", "value"),
    [
        ((*NGRAM, "--speculative-ngram-max-bfs-breadth", "1"), "use at least 2", "-breadth 1"),
        ((*NGRAM, "--enable-linear-replayssm-spec"), "drop --enable-linear-replayssm-spec", "-algorithm NGRAM"),
        (
            (*EAGLE, "--enable-linear-replayssm-spec", "--mamba-radix-cache-strategy", "no_buffer"),
            "use --mamba-radix-cache-strategy extra_buffer",
            ": no_buffer",
        ),
        (
            (*EAGLE, "--enable-linear-replayssm-spec", "--disable-overlap-schedule"),
            "use --mamba-radix-cache-strategy extra_buffer",
            ": auto",
        ),
        ((*EAGLE, "--enable-streaming-session"), "drop --enable-streaming-session", "-algorithm EAGLE"),
        ((*NGRAM, "--mamba-track-interval", "16"), "use at least 24, or", "-interval 16"),
        ((*EAGLE, "--mamba-track-interval", "4"), "use at least 8, or", "-interval 4"),
        (
            (*EAGLE, "--speculative-num-draft-tokens", "200", "--speculative-eagle-topk", "4"),
            "use at least 400, or",
            "-interval 256",
        ),
        ((*EAGLE, "--speculative-num-steps", "63", "--mamba-track-interval", "64"), "least 128", "-interval 64"),
        (("--speculative-algorithm", "DFLASH", "--mamba-track-interval", "16"), "least 32", "-interval 16"),
    ],
)
def test_wrong_answers_are_refused(tmp_path: Path, more: tuple[str, ...], remedy: str, value: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        check(tmp_path, *more)
    assert str(caught.value).endswith(value)
    check(tmp_path, *more, config=LLAMA)


@pytest.mark.parametrize(
    "more",
    [
        NGRAM,
        EAGLE,
        ("--enable-streaming-session",),
        (*NGRAM, "--mamba-track-interval", "24"),
        (*NGRAM, "--mamba-track-interval", "16", "--disable-overlap-schedule", "--page-size", "16"),
        (*NGRAM, "--mamba-track-interval", "16", "--device", "cpu", "--disable-overlap-schedule"),
        (*NGRAM, "--mamba-track-interval", "16", "--mamba-radix-cache-strategy", "no_buffer"),
        (*NGRAM, "--mamba-track-interval", "16", "--disable-radix-cache"),
        (*EAGLE, "--enable-linear-replayssm-spec"),
        (
            *EAGLE,
            "--enable-linear-replayssm-spec",
            "--mamba-radix-cache-strategy",
            "no_buffer",
            "--disable-radix-cache",
        ),
    ],
)
def test_the_rest_is_not(tmp_path: Path, more: tuple[str, ...]) -> None:
    check(tmp_path, *more)


def test_the_launcher_asks(tmp_path: Path) -> None:
    rest = ["--model-path", str(write(tmp_path / "model", QWEN3_NEXT)), *NGRAM]
    rest += ["--speculative-ngram-max-bfs-breadth", "1"]
    namespace = flags.parse_engine(rest)
    with pytest.raises(ConfigError, match="breadth"):
        arguments.complete(namespace, rest, HybridConfig(), models.inspect_model(namespace))


def launch(folder: Path, *more: str, config: dict[str, Any] = QWEN3_NEXT) -> list[str]:
    rest = ["--model-path", str(write(folder / "model", config)), "--device", "cuda", *more]
    namespace = flags.parse_engine(rest)
    return arguments.complete(namespace, rest, HybridConfig(), models.inspect_model(namespace))[0]


def with_head(folder: Path, config: dict[str, Any] = QWEN3_NEXT) -> Path:
    """A model folder whose weights name a tensor of a head."""
    model = write(folder / "model", config)
    header = json.dumps({"mtp.fc.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return model


DRAFT = "--speculative-draft-model-path"
STANDALONE = ("--speculative-algorithm", "STANDALONE")


@pytest.mark.parametrize(
    ("more", "remedy", "value"),
    [
        (EAGLE, "hold no head", "/model"),
        (("--speculative-algorithm", "NEXTN"), "hold no head", "/model"),
        (STANDALONE, f"give {DRAFT}", "-algorithm STANDALONE"),
        (("--speculative-algorithm", "EAGLE3"), f"give {DRAFT}", "-algorithm EAGLE3"),
        ((*EAGLE, "--speculative-eagle-topk", "4"), "add --speculative-num-steps", "-topk 4"),
        ((*STANDALONE, DRAFT, "/nowhere/at/all"), "no such model folder", "/nowhere/at/all"),
        ((*STANDALONE, DRAFT, "{folder}"), "no config.json", "{folder}"),
        ((*STANDALONE, DRAFT, "{folder}/other"), "the same tokenizer", "/other"),
    ],
)
def test_what_drafts_must_be_there(tmp_path: Path, more: tuple[str, ...], remedy: str, value: str) -> None:
    write(tmp_path / "other", {**LLAMA, "vocab_size": 1000})
    with pytest.raises(ConfigError, match=remedy) as caught:
        launch(tmp_path, *(argument.format(folder=tmp_path) for argument in more))
    assert str(caught.value).endswith(value.format(folder=tmp_path))


def test_models_without_a_head_need_a_draft(tmp_path: Path) -> None:
    falcon = {**QWEN3_NEXT, "architectures": ["FalconH1ForCausalLM"]}
    namespace = flags.parse_engine(["--model-path", str(with_head(tmp_path)), *EAGLE])
    model = models.inspect_model(namespace)
    with pytest.raises(ConfigError, match="nothing is there that drafts for FalconH1ForCausalLM"):
        drafts.check(namespace, replace(model, config=falcon), on_cpu=False)


def test_a_head_a_draft_and_steps_alone_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    model = with_head(tmp_path)
    rest = ["--model-path", str(model), "--device", "cuda", *EAGLE, "--speculative-num-steps", "3"]
    namespace = flags.parse_engine(rest)
    final, _ = arguments.complete(namespace, rest, HybridConfig(), models.inspect_model(namespace))
    assert final[final.index("--speculative-eagle-topk") + 1] == "1", "steps without a width are a chain"
    launch(tmp_path, *STANDALONE, DRAFT, str(write(tmp_path / "draft", LLAMA)))
    launch(tmp_path, *STANDALONE, DRAFT, "some-organisation/some-model")
    launch(tmp_path, *EAGLE, "--load-format", "dummy")


def test_what_a_cpu_cannot_draft_with(tmp_path: Path) -> None:
    model = with_head(tmp_path)
    namespace = flags.parse_engine(["--model-path", str(model), *EAGLE])
    with pytest.raises(ConfigError, match="served on a GPU only"):
        drafts.check(namespace, models.inspect_model(namespace), on_cpu=True)
    namespace = flags.parse_engine(["--model-path", str(model), *STANDALONE, DRAFT, str(model)])
    with pytest.raises(ConfigError, match="attention alone can draft"):
        drafts.check(namespace, models.inspect_model(namespace), on_cpu=True)
    drafts.check(namespace, models.inspect_model(namespace), on_cpu=False)


def test_a_cpu_needs_a_version_it_was_run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = flags.parse_engine(["--model-path", str(write(tmp_path / "model", QWEN3_NEXT)), *NGRAM])
    model = models.inspect_model(namespace)
    drafts.check(namespace, model, on_cpu=True)
    monkeypatch.setattr(compat, "engine_version", lambda: "0.5.17")
    drafts.check(namespace, model, on_cpu=False)
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.21 and .* only; .*: 0\.5\.17$"):
        drafts.check(namespace, model, on_cpu=True)


def test_a_cpus_budget_counts_candidates_and_drafts(tmp_path: Path) -> None:
    """States of candidates of 16 requests and the pool's padding, and KV of what drafts."""
    config = HybridConfig(cpu_memory_gb=0.02)
    write(tmp_path / "draft", {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})

    def sized(*more: str) -> tuple[int, int]:
        namespace = flags.parse_engine(["--model-path", str(tmp_path / "model"), *more])
        chosen = cpu_profile.flags(namespace, config, spec, "float32", "Qwen3NextForCausalLM")
        return chosen["max_total_tokens"], chosen["max_mamba_cache_size"]

    spec = models.inspect_model(flags.parse_engine(["--model-path", str(with_head(tmp_path))])).spec
    assert spec is not None
    costs = spec.with_dtypes(kv_dtype="float32", conv_dtype="float32")
    plain_tokens, plain_states = sized()
    tokens, states = sized(*STANDALONE, DRAFT, str(tmp_path / "draft"))
    drafted_bytes = 4 * 2 * LLAMA["num_hidden_layers"] * LLAMA["num_key_value_heads"] * LLAMA["head_dim"]
    used = tokens * (costs.kv_bytes_per_token + drafted_bytes) + (states + 17 * 4) * costs.checkpoint_bytes
    assert 0.99 * config.cpu_memory_bytes < used <= config.cpu_memory_bytes
    assert tokens < plain_tokens
    assert states < plain_states


def test_drafts_of_lfm2_are_refused_on_a_cpu(tmp_path: Path) -> None:
    """Their verification is a kernel of SGLang's, and the scheduler ended on it while the server started."""
    namespace = flags.parse_engine(["--model-path", str(write(tmp_path / "model", LFM2)), "--device", "cpu", *NGRAM])
    model = models.inspect_model(namespace)
    with pytest.raises(ConfigError, match=r"on a GPU only.*drop it: --speculative-algorithm NGRAM"):
        drafts.check(namespace, model, on_cpu=True)
    drafts.check(namespace, model, on_cpu=False)
