"""Settings that SGLang's parser takes and its processes end on, or answer wrongly by, are refused before the start."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_hybrid import launch_server
from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.spec import from_config
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import arguments, early, flags, models
from sglang_hybrid.engine.launch.models import Model
from sglang_hybrid.engine.launch.refusals import adapters, architectures, cache, servers
from tests.engine.configs import LLAMA, QWEN3_NEXT, write

EXPERTS = "--enable-return-routed-experts"
RING = "--enable-linear-replayssm --mamba-radix-cache-strategy no_buffer"
MAMBA2 = {**PUBLISHED["granite-4.0-h-small"], "architectures": ["GraniteMoeHybridForCausalLM"]}


def complete(folder: Path, *more: str, **ours: str) -> None:
    """What the launcher does with a command line."""
    rest = ["--model-path", str(folder), *more]
    namespace = flags.parse_engine(rest)
    config = HybridConfig(**ours)  # type: ignore[arg-type]
    arguments.complete(namespace, rest, config, models.inspect_model(namespace))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("--detokenizer-worker-num 2", "add --tokenizer-worker-num 2 or drop: --detokenizer-worker-num 2"),
        ("--detokenizer-worker-num 2 --tokenizer-worker-num 2", ""),
        ("--use-ray", "for replicas, and drop: --use-ray"),
        ("--api-key secret --tokenizer-worker-num 2", "drop --tokenizer-worker-num 2: --api-key"),
        ("--admin-api-key secret --tokenizer-worker-num 3", "drop --tokenizer-worker-num 3: --admin-api-key"),
        ("--api-key secret --admin-api-key secret --tokenizer-worker-num 1", ""),
        ("--grpc-port 6000", "would end this server; unset SGLANG_GRPC_PORT or drop: --grpc-port 6000"),
        ("--dcp-size 2 --tp-size 2", "drop it or add --hybrid-backend stock: --dcp-size 2"),
        ("--enable-prefill-delayer", "add --hybrid-cpu-event-loop overlap: --enable-prefill-delayer"),
        ("--dllm-algorithm LowConfidence", "one token after the other; drop: --dllm-algorithm LowConfidence"),
        ("--enable-pdmux", "would end at the first request; drop: --enable-pdmux"),
        ("--enable-two-batch-overlap --moe-a2a-backend deepep", "--disable-radix-cache: --enable-two-batch-overlap"),
        ("--enable-two-batch-overlap --moe-a2a-backend deepep --disable-radix-cache", ""),
        ("--radix-eviction-policy lfu", "with --hybrid-policy lru: --radix-eviction-policy lfu"),
        ("--mamba-max-states-per-path 1", "add --hybrid-backend stock: --mamba-max-states-per-path 1"),
        ("--attention-backend triton", "there is torch_native or intel_amx; drop: --attention-backend triton"),
        ("--decode-attention-backend flashinfer", "drop: --decode-attention-backend flashinfer"),
        ("--linear-attn-prefill-backend flashinfer", "there is triton; drop: --linear-attn-prefill-backend flashinfer"),
        ("--linear-attn-backend triton", ""),
        ("--mamba-backend flashinfer", "drop: --mamba-backend flashinfer"),
        ("--cpu-offload-gb 2", "drop: --cpu-offload-gb 2"),
        ("--offload-group-size 1 --offload-num-in-group 1", "drop: --offload-group-size 1"),
        ("--enable-torch-compile", "drop: --enable-torch-compile"),
        ("--enable-forward-pass-metrics", "drop: --enable-forward-pass-metrics"),
        ("--enable-deterministic-inference", "drop: --enable-deterministic-inference"),
        ("--rl-on-policy-target fsdp", "drop: --rl-on-policy-target"),
        ("--enable-strict-thinking --reasoning-parser qwen3", "drop: --enable-strict-thinking"),
        (RING, "drop: --enable-linear-replayssm"),
        (f"{RING} --enable-mixed-chunk", "drop one of them: --enable-mixed-chunk"),
        (f"{RING} --enable-streaming-session", "drop one of them: --enable-streaming-session"),
        ("--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype fp8_e4m3"),
        ("--quantization fp8", "serve the checkpoint that is not: --quantization fp8"),
        ("--quantization unquant", ""),
        ("--is-embedding", "drop --is-embedding: Qwen3NextForCausalLM"),
        ("--mamba-track-interval 0", "--mamba-track-interval must be 1 or more: 0"),
        ("--prefill-max-requests -1", "--prefill-max-requests must be 1 or more: -1"),
        ("--page-size 0", "--page-size must be 1 or more: 0"),
        ("--max-running-requests 0", "--max-running-requests must be 1 or more: 0"),
        ("--context-length -5", "--context-length must be 1 or more: -5"),
        ("--context-length 7", "give --context-length 8 or more: 7"),
        (EXPERTS, ""),
        (f"{EXPERTS} --enable-hierarchical-cache", "experts or: --enable-hierarchical-cache"),
        (f"{EXPERTS} --disaggregation-mode decode", "or: --disaggregation-mode decode"),
        (f"{EXPERTS} --disaggregation-mode prefill", "or: --disaggregation-mode prefill"),
        (f"{EXPERTS} --chunked-prefill-size -1", "or: --chunked-prefill-size -1"),
    ],
)
def test_what_a_process_would_end_on(tmp_path: Path, given: str, why: str) -> None:
    folder = write(tmp_path, QWEN3_NEXT)
    if not why:
        complete(folder, *given.split())
        return
    with pytest.raises(ConfigError) as refused:
        complete(folder, *given.split())
    assert str(refused.value).endswith(why)


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_a_quantized_checkpoint_on_a_cpu(tmp_path: Path, where: str) -> None:
    told = {"quantization_config": {"quant_method": "fp8"}} if where == "config.json" else {}
    folder = write(tmp_path, {**QWEN3_NEXT, **told})
    if not told:
        (folder / where).write_text(json.dumps({"quantization": {"quant_algo": "fp8"}}))
    with pytest.raises(ConfigError, match=r"quantized weights need a GPU, .* \(fp8\)$"):
        complete(folder)
    complete(folder, "--quantization", "unquant")


@pytest.mark.parametrize("name", ["FalconH1ForCausalLM", "Qwen3NextForCausalLM"])
@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ({"enable_dp_attention": True, "dp_size": 2}, "--enable-dp-attention --dp-size 2"),
        ({"attn_dp_size": 2}, "--attn-dp-size 2"),
        ({"enable_dp_attention": True, "dp_size": 1}, ""),
        ({"dp_size": 2}, ""),
    ],
)
def test_data_parallel_attention_needs_states_that_fit_the_layers(name: str, groups: dict[str, Any], why: str) -> None:
    namespace = argparse.Namespace(**{"enable_dp_attention": False, "dp_size": 1, **groups})
    model = Model("m", {"architectures": [name]})
    if not why or name == "Qwen3NextForCausalLM":
        architectures._check_groups(namespace, model)
        return
    with pytest.raises(ConfigError, match=f"no data-parallel attention for {name}.*: {why}$"):
        architectures._check_groups(namespace, model)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, ""),
        ({"dp_size": 1, "enable_dp_attention_local_control_broadcast": True}, ""),
        ({"enable_dp_attention_local_control_broadcast": True}, "--enable-dp-attention-local-control-broadcast"),
        ({"enable_dp_attention_local_control_broadcast": True, "dwdp_size": 2}, "--dwdp-size 2"),
        ({"enable_dp_attention": False, "dp_size": 1, "dwdp_size": 2}, "--dwdp-size 2"),
    ],
)
def test_groups_of_ranks_get_what_is_for_all_of_them_together(given: dict[str, Any], asked: str) -> None:
    namespace = argparse.Namespace(**{"enable_dp_attention": True, "dp_size": 2, **given})
    model = Model("m", {"architectures": ["Qwen3NextForCausalLM"]})
    if not asked:
        architectures._check_groups(namespace, model)
        return
    with pytest.raises(ConfigError, match=f"hangs or answers with a part of the new weights; drop: {asked}$"):
        architectures._check_groups(namespace, model)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("others", [True, False])
def test_traces_need_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, others: bool) -> None:
    """The part that other packages bring is none of them."""

    def find(name: str) -> object:
        if there or (others and name.count(".") == 0):
            return object()
        if others:
            raise ModuleNotFoundError(name)
        return None

    monkeypatch.setattr(servers, "find_spec", find)
    folder = write(tmp_path, QWEN3_NEXT)
    if there:
        complete(folder, "--enable-trace")
        return
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-api .* or drop: --enable-trace$"):
        complete(folder, "--enable-trace")


@pytest.mark.parametrize(("error", "said"), [(ValueError("why"), "why"), (ValueError(), 'raise error  # "line"')])
def test_an_error_without_words_is_shown_by_its_line(error: ValueError, said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        raise error  # "line"
    assert launch_server._said(caught.value) == said


@pytest.mark.parametrize(
    ("config", "given", "why"),
    [
        (MAMBA2, "--chunked-prefill-size 32", "give --chunked-prefill-size 256 or more: 32"),
        (MAMBA2, "--chunked-prefill-size 256", ""),
        (MAMBA2, "--chunked-prefill-size -1", ""),
        (MAMBA2, "--chunked-prefill-size 32 --mamba-radix-cache-strategy no_buffer", ""),
        (MAMBA2, "--chunked-prefill-size 32 --disable-radix-cache", ""),
        (QWEN3_NEXT, "--chunked-prefill-size 32", "give --chunked-prefill-size 64 or more: 32"),
        (LLAMA, "--chunked-prefill-size 32", ""),
        (MAMBA2, "--mamba-track-interval 128", "give --mamba-track-interval 256 or more: 128"),
        (MAMBA2, "--mamba-track-interval 128 --mamba-radix-cache-strategy no_buffer", ""),
        (MAMBA2, "--mamba-track-interval 256", ""),
        (QWEN3_NEXT, "--mamba-track-interval 32", ""),
    ],
)
def test_chunks_that_no_state_is_saved_from(tmp_path: Path, config: dict[str, Any], given: str, why: str) -> None:
    model = models.inspect_model(flags.parse_engine(["--model-path", str(write(tmp_path, config))]))
    namespace = flags.parse_engine(["--model-path", str(tmp_path), *given.split()])
    with pytest.raises(ConfigError, match=f"{why}$") if why else nullcontext():
        cache._check_chunks(namespace, model)


@pytest.mark.parametrize(
    ("version", "page", "wrong"), [("0.5.17", 128, True), ("0.5.17", 64, False), ("0.5.21", 128, False)]
)
def test_pages_longer_than_the_distance_of_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, page: int, wrong: bool
) -> None:
    """A prompt of 400 tokens got the state of 192 filed under 384 with SGLang 0.5.17: it counts chunks by pages."""
    model = models.inspect_model(flags.parse_engine(["--model-path", str(write(tmp_path, QWEN3_NEXT))]))
    namespace = flags.parse_engine(["--model-path", str(tmp_path), "--page-size", str(page)])
    monkeypatch.setattr(compat, "engine_version", lambda: version)
    with pytest.raises(ConfigError, match=r"use --page-size 64: 128$") if wrong else nullcontext():
        cache._check_chunks(namespace, model)


@pytest.mark.parametrize(
    ("given", "targets", "refused"),
    [
        ("--lora-paths {folder}/A", [["o_proj", "lm_head"]], False),
        ("--lora-paths {folder}/A", [["o_proj", "down_proj"]], False),
        ("--lora-paths {folder}/A", [["mlp.gate_proj", "down_proj"]], True),
        ("--lora-paths {folder}/A", ["all-linear"], True),
        ("--lora-paths {folder}/A B={folder}/B", [["o_proj"], ["down_proj"]], False),
        ("--lora-paths {folder}/A B={folder}/B", [["up_proj"], ["down_proj"]], True),
        ("--lora-paths {folder}/none somebody/adapter", [], False),
        ("--lora-target-modules o_proj --lora-paths {folder}/A", [["up_proj", "down_proj"]], False),
        ("--lora-target-modules down_proj gate_up_proj --max-lora-rank 8", [], True),
    ],
)
def test_adapters_of_experts_on_a_cpu(tmp_path: Path, given: str, targets: list[Any], refused: bool) -> None:
    for name, modules in zip("AB", targets, strict=False):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"target_modules": modules}))
    namespace = flags.parse_engine(["--model-path", "m", "--enable-lora", *given.format(folder=tmp_path).split()])
    experts = Model("m", QWEN3_NEXT, from_config(QWEN3_NEXT))
    if refused:
        with pytest.raises(ConfigError, match=r"on a GPU only; .*: --lora-(paths|target-modules) "):
            adapters.check(namespace, experts)
    else:
        adapters.check(namespace, experts)
    adapters.check(namespace, Model("m", LLAMA, from_config(LLAMA)))


@pytest.mark.parametrize(
    ("size", "ranks", "targets", "refused"),
    [
        (256, 2, ["down_proj"], False),
        (224, 2, ["down_proj"], True),
        (224, 2, ["o_proj", "mlp.up_proj"], True),
        (224, 2, ["o_proj", "lm_head"], False),
        (224, 1, ["down_proj"], False),
    ],
)
def test_adapters_of_widened_layers_on_a_cpu(
    tmp_path: Path, size: int, ranks: int, targets: list[str], refused: bool
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"target_modules": targets}))
    given = ["--model-path", "m", "--enable-lora", "--lora-paths", f"A={tmp_path}", "--tp-size", str(ranks)]
    namespace, config = flags.parse_engine(given), {**LLAMA, "intermediate_size": size}
    with pytest.raises(ConfigError, match="intermediate_size 224: --lora-paths") if refused else nullcontext():
        adapters.check(namespace, Model("m", config, from_config(config)))


@pytest.mark.skipif(not compat.at_least("0.5.21"), reason="SGLang looks at it since")
def test_adapters_with_data_parallel_attention() -> None:
    two = {"enable_dp_attention": True, "dp_size": 2}

    def check(on_cpu: bool, **given: Any) -> None:
        asked = {"enable_lora": True, "lora_paths": None, "lora_backend": "triton", "dp_size": 1, **given}
        adapters.check_groups(argparse.Namespace(**asked), on_cpu)

    with pytest.raises(ConfigError, match="alone: 2 groups, --lora-backend torch_native"):
        check(True, **two, lora_backend="torch_native")
    with pytest.raises(ConfigError, match="add --lora-backend triton: 2 groups, --lora-backend csgmv"):
        check(False, **two, lora_backend="csgmv", enable_lora=None, lora_paths=["A=a"])
    check(False, **two)
    check(True, **two, enable_lora=False)
    check(True, lora_backend="torch_native")


def test_experts_and_segments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="experts or: --hybrid-segments on"):
        complete(write(tmp_path, QWEN3_NEXT), EXPERTS, segments="on")


def test_sglang_s_order_where_sglang_evicts(tmp_path: Path) -> None:
    """With its policy, with its cache, and for models that its cache serves."""
    hybrid, dense = write(tmp_path / "hybrid", QWEN3_NEXT), write(tmp_path / "dense", LLAMA)
    for folder, ours in ((hybrid, {"policy": "lru"}), (hybrid, {"backend": "stock"}), (dense, {})):
        complete(folder, "--radix-eviction-policy", "lfu", **ours)


@pytest.mark.parametrize(
    ("name", "tied", "why"),
    [
        (
            "Qwen3NextForCausalLM",
            False,
            "cuts no Qwen3NextForCausalLM into pipeline stages; use --tp-size: --pp-size 2",
        ),
        ("FalconH1ForCausalLM", True, "cuts no"),
        ("Qwen3_5ForCausalLM", True, "every answer is wrong"),
        ("Qwen3_5ForCausalLM", False, ""),
        ("NemotronHForCausalLM", True, ""),
    ],
)
def test_models_that_sglang_cannot_cut(name: str, tied: bool, why: str) -> None:
    model = Model("m", {"architectures": [name], "tie_word_embeddings": tied})
    one, two = (flags.parse_engine(["--model-path", "m", "--pp-size", size]) for size in "12")
    architectures._check_stages(one, model)
    if not why:
        architectures._check_stages(two, model)
        return
    with pytest.raises(ConfigError, match=why):
        architectures._check_stages(two, model)


def test_overrides_of_the_configuration_count(tmp_path: Path) -> None:
    folder = write(tmp_path, {**QWEN3_NEXT, "architectures": ["NobodyForCausalLM"]})
    overrides = json.dumps({"architectures": ["Qwen3NextForCausalLM"], "num_experts": 0})
    words = ["--model-path", str(folder), "--json-model-override-args", overrides]
    model = models.inspect_model(flags.parse_engine(words))
    assert model.spec is not None
    assert "moe" not in model.spec.layer_counts
    assert models.inspect_model(early.read(words)) == model
    for text, why in (("{a: 1}", "must be a JSON object"), ("[1]", r"must be a JSON object: \[1\]")):
        with pytest.raises(ConfigError, match=why):
            models.inspect_model(early.read([*words[:2], "--json-model-override-args", text]))


ENDS = """
import os, subprocess
from sglang.srt.utils.common import kill_process_tree
from sglang_hybrid.engine.processes import stop
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
stop.end_with_status(kill_process_tree, os.getpid())
"""


def test_a_server_that_cannot_go_on_has_a_status(tmp_path: Path) -> None:
    """SIGKILL, which SGLang sends itself, looks like the kernel's out-of-memory killer."""
    done = subprocess.run([sys.executable, "-c", ENDS], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stderr
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(done.stdout)).status() == psutil.STATUS_ZOMBIE, "its child outlived it"
