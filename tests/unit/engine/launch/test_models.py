"""What the launcher says of the model before anything starts: costs that are not known, layers that need a GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.served import ARCHITECTURES, Where
from sglang_hybrid.core.spec import from_config
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import arguments, cpu_profile, early, flags, models, settings
from sglang_hybrid.engine.launch.models import Model
from tests.engine.configs import LFM2, QWEN3_NEXT, write
from tests.unit.engine.launch.test_launch_server import refused
from tests.versions import since

UNKNOWN = {**QWEN3_NEXT, "architectures": ["Ernie4_5_ForCausalLM"], "model_type": "of_next_year"}


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ((), "give --max-total-tokens and --max-mamba-cache-size: Ernie4_5_ForCausalLM"),
        (("--max-total-tokens", "4096"), "give --max-mamba-cache-size: Ernie4_5_ForCausalLM"),
        (("--max-mamba-cache-size", "64"), "give --max-total-tokens: Ernie4_5_ForCausalLM"),
    ],
)
def test_a_model_of_unknown_costs_needs_sizes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, given: tuple[str, ...], missing: str
) -> None:
    model = ("--model-path", str(write(tmp_path, UNKNOWN)))
    assert refused(capsys, *model, "--load-format", "dummy", *given).endswith(missing)


def test_a_model_of_unknown_costs_starts_with_the_sizes_given(tmp_path: Path) -> None:
    rest = ["--model-path", str(write(tmp_path, UNKNOWN))]
    rest += ["--max-total-tokens", "4096", "--max-mamba-cache-size", "64"]
    namespace = flags.parse_engine(rest)
    _, parsed = arguments.complete(namespace, rest, HybridConfig(), models.inspect_model(namespace))
    assert (parsed.max_total_tokens, parsed.max_mamba_cache_size) == (4096, 64)


def test_models_of_a_package_of_ones_own_are_not_looked_for_in_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = flags.parse_engine(["--model-path", str(write(tmp_path, {**UNKNOWN, "architectures": ["OursForLM"]}))])
    namespace.load_format = "dummy"
    with pytest.raises(ConfigError, match="this SGLang serves no such architecture"):
        models.inspect_model(namespace)
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "our_models")
    assert models.inspect_model(namespace).architecture == "OursForLM"


def test_a_model_whose_configuration_is_damaged_needs_sizes_and_says_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write(tmp_path, {**QWEN3_NEXT, "linear_num_key_heads": "two"})
    line = refused(capsys, "--model-path", str(folder))
    assert "linear_num_key_heads must be an integer of at least 1: 'two'" in line
    assert line.endswith("give --max-total-tokens and --max-mamba-cache-size: Qwen3NextForCausalLM")


NEWER = {
    "InternS2MobiusForConditionalGeneration", "GigaChat35ForCausalLM", "Qwen4ExpForConditionalGeneration",
    "BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration", "Glm5NextForConditionalGeneration",
    "MiniCPMSALAForCausalLM", "NemotronH_Omni_Reasoning_V3", "Mamba2ForCausalLM", "MambaForCausalLM",
    "FalconMambaForCausalLM",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=since("0.5.21", "this model") if name in NEWER else ())
        for name, row in ARCHITECTURES.items()
        if row.where is Where.GPU and "0.5.23" not in row.note
    ],
)
def test_layers_without_cpu_kernels_are_refused_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = {**QWEN3_NEXT, "architectures": [name], "model_type": ARCHITECTURES[name].model_type}
    namespace = argparse.Namespace(model_path=str(write(tmp_path, config)), load_format="dummy")
    with pytest.raises(ConfigError, match=f"on a GPU only.* Qwen3NextForCausalLM, .*: {name}"):
        early.check_model(namespace)
    monkeypatch.setattr(models, "ARCHITECTURES", {**ARCHITECTURES, name: replace(ARCHITECTURES[name], where=Where.CPU)})
    early.check_model(namespace)


def test_a_gpu_model_is_refused_before_sizes_are_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It took 10.9 GB of pools under a limit of 1 GB, said that it was active and died on the first request."""
    config = {**QWEN3_NEXT, "architectures": ["KimiK3LinearForCausalLM"], "model_type": "kimi_linear"}
    sizes = ("--max-total-tokens", "4096", "--max-mamba-cache-size", "64")
    for given in ((), sizes):
        line = refused(capsys, "--model-path", str(write(tmp_path, config)), "--device", "cpu", *given)
        assert line.endswith(": KimiK3LinearForCausalLM")
        assert "served on a GPU only" in line


@since("0.5.21", "a Kimi-Linear that a CPU can build")
def test_a_cpu_builds_kimi_linear_from_a_version_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**PUBLISHED["kimi-linear-48b-a3b"], "architectures": ["KimiLinearForCausalLM"]}
    namespace = argparse.Namespace(model_path=str(write(tmp_path, config)), load_format="dummy")
    early.check_model(namespace)
    monkeypatch.setattr(compat, "complete", lambda: False)
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.21 or newer"):
        early.check_model(namespace)


def test_nemotron_with_experts_needs_a_gpu(tmp_path: Path) -> None:
    """SGLang's router multiplies into another type, which PyTorch does on a GPU only."""
    for preset, served in (("nemotron-h-8b", True), ("nemotron-3-nano-30b-a3b", False)):
        config = {**PUBLISHED[preset], "architectures": ["NemotronHForCausalLM"]}
        model = Model("x", config, from_config(config))
        if served:
            models.check_computable(model)
        else:
            with pytest.raises(ConfigError, match=r"with moe layers .* on a GPU only.*: NemotronHForCausalLM"):
                models.check_computable(model)


@pytest.mark.parametrize("more", [{}, {"auto_map": {"AutoConfig": "configuration_zamba2.Zamba2Config"}}])
def test_a_model_that_only_spec_knows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: dict[str, object]
) -> None:
    """Also if code travels with it, as with Ring linear and MiniMax: SGLang would ask for it, and then not run it."""
    config = {**QWEN3_NEXT, "architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2", **more}
    assert "`sglang-hybrid spec` and simulate know it" in refused(capsys, "--model-path", str(write(tmp_path, config)))


def test_a_model_without_extra_buffer_gets_no_buffer_on_a_cpu(tmp_path: Path) -> None:
    rest = ["--model-path", str(write(tmp_path, LFM2)), "--device", "cpu"]
    namespace = flags.parse_engine(rest)
    model = models.inspect_model(namespace)
    chosen = cpu_profile.flags(namespace, HybridConfig(), model.spec, "float32", "Lfm2ForCausalLM")
    assert chosen["mamba_radix_cache_strategy"] == "no_buffer"
    assert chosen["max_total_tokens"] * 256 + chosen["max_mamba_cache_size"] * 512 <= 10**9
    overlap = HybridConfig(cpu_event_loop="overlap")
    with pytest.raises(ConfigError, match="drop --hybrid-cpu-event-loop overlap: Lfm2ForCausalLM"):
        cpu_profile.flags(namespace, overlap, model.spec, "float32", "Lfm2ForCausalLM")


def test_a_hub_name_on_a_cpu_needs_sizes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, "--model-path", "Org/Model-8B", "--device", "cpu")
    assert "download it and give its folder, or give --max-total-tokens and --max-mamba-cache-size" in line


def test_events_of_states_are_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler would end on what it has to import, with a traceback."""
    channel = early.read(["--kv-events-config", '{"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}'])
    monkeypatch.setattr(compat, "engine_version", lambda: "0.5.17")
    with pytest.raises(ConfigError, match=r"--hybrid-state-events needs SGLang 0\.5\.21 or newer.*: 0\.5\.17"):
        settings.check_files(HybridConfig(state_events="published"), channel)
