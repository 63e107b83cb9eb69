"""Bad input to the launcher: exit status 2 and a message with the remedy and the value, before anything starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Container
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid import launch_server
from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.process import free_port
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import arguments, cpu_profile, early, flags, models, settings, slots
from sglang_hybrid.engine.launch.models import Model
from tests.engine.configs import LLAMA, QWEN3_NEXT, write
from tests.versions import since

LPM = "To use priority scheduling, schedule_policy must be 'fcfs' or 'lof'. 'lpm' is not supported."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", QWEN3_NEXT)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run the launcher; assert that it refuses with status 2 and one line; return the line."""
    assert launch_server.main(["--port", str(free_port()), *argv]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


def test_unknown_flag_of_sglang(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    line = refused(capsys, "--model-path", str(folder), "--max-total-token", "5", "--chunked-prefil-sise", "8")
    assert "did you mean --chunked-prefill-size?" in line
    assert line.endswith("--chunked-prefil-sise")


def test_unknown_flag_of_ours(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    line = refused(capsys, "--model-path", str(folder), "--hybrid-cpu-memory", "5")
    assert "did you mean --hybrid-cpu-memory-gb?" in line


def test_missing_model_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model-path" in refused(capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{cpu_memory_gb: [", "neither valid JSON nor valid YAML"),
        ("no-such-file.yaml", "no such configuration file"),
        ('{"cpu_memory": 1}', "did you mean 'cpu_memory_gb': 'cpu_memory'"),
        ('{"cpu_memory_gb": "much"}', "must be of type float: 'much'"),
        ('{"cpu_memory_gb": -1}', "must be positive, for example 1.0: -1.0"),
        ('{"policy": "fifo"}', "unknown policy, choose one of forecast"),
        ('{"policy": "gdsf"}', "the policy is the simulator's, serve one of forecast, recency, lru, marconi-online"),
        ('{"policy": "marconi:.5.5"}', "as marconi:0.5: 'marconi:.5.5'"),
        ('{"eviction": "lru"}', "the setting is called policy now"),
        ('{"request_log_mb": .nan}', "request_log_mb must be a finite number: nan"),
        ('{"cpu_threads": -2}', "must be 0 (automatic) or more: -2"),
        ('{"backend": "magic"}', "must be one of hybrid, stock: 'magic'"),
    ],
)
def test_bad_configuration(capsys: pytest.CaptureFixture[str], folder: Path, text: str, message: str) -> None:
    assert message in refused(capsys, "--model-path", str(folder), "--hybrid-config", text)


def test_configuration_that_is_no_mapping(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text("- 1\n- 2\n")
    assert "must hold a mapping" in refused(capsys, "--model-path", "x/y", "--hybrid-config", str(file))


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "hybrid.yaml"
    file.write_text("cpu_memory_gb: 3\ncpu_threads: 2\n")
    config, rest = flags.split(["--hybrid-config", str(file), "--hybrid-cpu-threads", "1", "--port", "7"])
    assert config == HybridConfig(cpu_memory_gb=3.0, cpu_threads=1)
    assert rest == ["--port", "7"]
    assert HybridConfig.from_json(config.to_json()) == config


def test_missing_model_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--model-path", "./not/there").endswith("./not/there")


def test_folder_without_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "has no config.json" in refused(capsys, "--model-path", str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_malformed_model_config(capsys: pytest.CaptureFixture[str], folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert str(folder / "config.json") in refused(capsys, "--model-path", str(folder))


def test_folder_without_weights(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refused(capsys, "--model-path", str(folder))


def test_unsupported_architecture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write(tmp_path, {**QWEN3_NEXT, "architectures": ["Qwen3NextestForCausalLM"]})
    line = refused(capsys, "--model-path", str(tmp_path))
    assert "Qwen3NextForCausalLM" in line
    assert line.endswith("Qwen3NextestForCausalLM")


def test_port_in_use(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert launch_server.main(["--model-path", str(folder), "--port", str(port)]) == 2
    assert f"pass another --port: {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--max-total-tokens", "10"), "no room for one request, at least 128 are needed: 10"),
        (("--max-mamba-cache-size", "2"), "which takes 3 state slots under this strategy: 2"),
        (("--hybrid-cpu-memory-gb", "0.0001"), "raise --hybrid-cpu-memory-gb to "),
    ],
)
def test_too_little_memory_for_one_request(
    capsys: pytest.CaptureFixture[str], folder: Path, given: tuple[str, str], message: str
) -> None:
    assert message in refused(capsys, "--model-path", str(folder), *given)


@pytest.mark.parametrize("config", [QWEN3_NEXT, LLAMA])
@pytest.mark.parametrize("budget_bytes", [1, 100_000])
def test_the_budget_that_is_asked_for_is_enough_and_not_much_more(
    tmp_path: Path, config: dict[str, Any], budget_bytes: int
) -> None:
    spec = models.inspect_model(flags.parse_engine(["--model-path", str(write(tmp_path, config))])).spec
    assert spec is not None
    with pytest.raises(ConfigError, match="raise --hybrid-cpu-memory-gb to ") as refusal:
        cpu_profile.sizes(budget_bytes, spec)
    asked = refusal.value.args[0].split("raise --hybrid-cpu-memory-gb to ")[1].split(":")[0]
    enough = HybridConfig(cpu_memory_gb=float(asked)).cpu_memory_bytes
    assert cpu_profile.sizes(enough, spec)[0] >= 2048
    with pytest.raises(ConfigError):
        cpu_profile.sizes(int(0.85 * enough), spec)


def test_a_budget_beyond_the_machine(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    line = refused(capsys, "--model-path", str(folder), "--device", "cpu", "--hybrid-cpu-memory-gb", "200000")
    assert line.endswith("lower --hybrid-cpu-memory-gb: 200000")


@pytest.mark.parametrize(("budget_gb", "told"), [(1.0, False), (0.02, False), (3.0, True)])
def test_a_budget_that_is_not_used_up_is_told(folder: Path, budget_gb: float, told: bool) -> None:
    config = HybridConfig(cpu_memory_gb=budget_gb)
    rest = ["--model-path", str(folder)]
    namespace = flags.parse_engine(rest)
    model = models.inspect_model(namespace)
    _, parsed = arguments.complete(namespace, rest, config, model)
    note = arguments.unused_memory(parsed, config, model)
    assert (note is not None) is told
    if note is not None:
        assert "262,144 tokens and 512 states take 0.097 of the 3 GB" in note


@pytest.mark.parametrize("ours", ["request-log", "seed-prefixes"])
@pytest.mark.parametrize(
    ("config", "cause"),
    [
        (QWEN3_NEXT, ("--hybrid-backend", "stock")),
        (QWEN3_NEXT, ("--disable-radix-cache",)),
        (LLAMA, ("LlamaForCausalLM",)),
    ],
)
def test_what_only_our_cache_takes_is_refused_without_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, Any], cause: tuple[str, ...], ours: str
) -> None:
    (tmp_path / "file").touch()
    given = [word for word in cause if not word.endswith("LM")]
    model = ("--model-path", str(write(tmp_path / "model", config)))
    line = refused(capsys, *model, f"--hybrid-{ours}", str(tmp_path / "file"), *given)
    assert " ".join(cause) in line
    assert line.endswith(f"drop --hybrid-{ours}: {tmp_path / 'file'}")


@pytest.mark.parametrize("text", ['{"cpu_memory_gb":1e9}', "{cpu_memory_gb: 1.0e+9}"])
def test_numbers_of_json_and_of_yaml(text: str) -> None:
    assert flags.split(["--hybrid-config", text])[0].cpu_memory_gb == 1e9


@pytest.mark.parametrize("given", [("--enable-lmcache",), ("--radix-cache-backend", "flexkv")])
def test_another_cache_needs_the_stock_backend(
    capsys: pytest.CaptureFixture[str], folder: Path, given: tuple[str, ...]
) -> None:
    assert "add --hybrid-backend stock" in refused(capsys, "--model-path", str(folder), *given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--page-size", "64", "--mamba-radix-cache-strategy", "no_buffer"), "no_buffer only supports page_size=1."),
        pytest.param(("--enable-priority-scheduling", "--schedule-policy", "lpm"), LPM, marks=pytest.mark.slow),
    ],
)
def test_what_sglang_refuses_is_one_line_too(folder: Path, given: tuple[str, ...], said: str) -> None:
    """In a process of its own: by then SGLang has begun to set up this one."""
    command = [sys.executable, "-m", "sglang_hybrid.launch_server", "--model-path", str(folder)]
    command += ["--port", str(free_port()), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1] == f"error: SGLang refuses these arguments: {said}"


def test_a_request_log_must_be_writable_and_of_one_scheduler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    given = ("--model-path", str(folder), "--hybrid-request-log")
    assert refused(capsys, *given, "/dev/full").endswith("(No space left on device); choose another file: /dev/full")
    assert refused(capsys, *given, str(tmp_path)).endswith(f"choose another file: {tmp_path}")
    log = tmp_path / "requests.jsonl"
    log.write_text("an earlier one")
    assert refused(capsys, *given, str(log), "--dp-size", "2").endswith("which make: 2")
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    groups = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
    if compat.engine_version() == "0.5.23":
        groups = ("--tp-size", "2", "--attn-dp-size", "2")
    assert refused(capsys, *given, str(log), *groups).endswith("which make: 2")
    assert refused(capsys, *given, str(log), "--max-total-tokens", "10").endswith("128 are needed: 10")
    assert log.read_text() == "an earlier one", "a server that does not start overwrites nothing"


def test_hot_prefixes_must_be_readable(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    hot = tmp_path / "hot.jsonl"
    hot.write_text('{"input_ids": [1, 2]}\n{"ids": [3]}\n')
    assert "line 2" in refused(capsys, "--model-path", str(folder), "--hybrid-seed-prefixes", str(hot))


def test_a_model_without_recurrent_layers_gets_a_note(tmp_path: Path) -> None:
    model = models.inspect_model(flags.parse_engine(["--model-path", str(write(tmp_path, LLAMA))]))
    assert model.note is not None
    assert "no recurrent layers" in model.note


def test_a_hub_name_is_left_to_sglang() -> None:
    assert models.inspect_model(flags.parse_engine(["--model-path", "Org/Model-8B"])) == Model("Org/Model-8B")


def test_defaults_fill_only_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_MAMBA_CONV_DTYPE", raising=False)
    rest = ["--model-path", str(folder), "--max-total-tokens", "5000", "--attention-backend=torch_native"]
    namespace = flags.parse_engine(rest)
    final, parsed = arguments.complete(namespace, rest, HybridConfig(), models.inspect_model(namespace))
    assert final[: len(rest)] == rest
    assert final.count("--attention-backend") == 0
    assert (parsed.max_total_tokens, parsed.device, parsed.radix_cache_backend) == (5000, "cpu", "hybrid")
    assert (parsed.dtype, parsed.mamba_radix_cache_strategy) == ("float32", "extra_buffer")
    assert parsed.max_mamba_cache_size * models.inspect_model(namespace).spec.checkpoint_bytes <= 5e8
    import os

    assert os.environ["SGLANG_MAMBA_CONV_DTYPE"] == "float32"  # the trap of SGLang 0.5.21


@pytest.mark.parametrize("without", [("--disable-overlap-schedule",), ("--pipeline-parallel-size", "2")])
def test_the_lazy_buffer_needs_the_overlap_schedule(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...]
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    lazy = ("--model-path", str(folder), "--mamba-radix-cache-strategy", "extra_buffer_lazy")
    line = refused(capsys, *lazy, *without)
    assert "use --mamba-radix-cache-strategy extra_buffer: " in line
    assert line.endswith(" ".join(without))


def test_mixed_chunks_and_tracked_states_are_refused(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    mixed = ("--model-path", str(folder), "--enable-mixed-chunk")
    for backend in ("hybrid", "stock"):
        line = refused(capsys, *mixed, "--hybrid-backend", backend)
        assert "add --mamba-radix-cache-strategy no_buffer: " in line
    for more in (["--mamba-radix-cache-strategy", "no_buffer"], ["--disable-radix-cache"]):
        namespace = flags.parse_engine(rest := [*mixed, *more])
        model = models.inspect_model(namespace)
        assert arguments.complete(namespace, rest, HybridConfig(), model)[1].enable_mixed_chunk


@since("0.5.21", "settings that its sizes are asked for apart")
def test_slots_of_a_request_are_those_that_sglang_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from sglang.srt.mem_cache import kv_cache_configurator as sizes

    for strategy, overlap, unlock in product(("no_buffer", "extra_buffer", "extra_buffer_lazy"), (True, False), "01"):
        if strategy == "extra_buffer_lazy" and not overlap:
            continue  # SGLang refuses it
        mamba = SimpleNamespace(
            enable_mamba_extra_buffer=strategy != "no_buffer",
            enable_mamba_extra_buffer_lazy=strategy == "extra_buffer_lazy",
        )
        monkeypatch.setattr(sizes, "get_memory", lambda: SimpleNamespace(disable_radix_cache=False))
        monkeypatch.setattr(sizes, "get_exec", lambda mamba=mamba: SimpleNamespace(mamba=mamba))
        monkeypatch.setattr(sizes, "get_schedule", lambda o=overlap: SimpleNamespace(disable_overlap_schedule=not o))
        monkeypatch.setenv(slots.UNLOCK, unlock)
        asked = sizes.KVCacheConfigurator._calculate_mamba_ratio(object())  # type: ignore[arg-type]
        assert slots.per_request(strategy, overlap) == asked, (strategy, overlap, unlock)


@pytest.mark.parametrize(
    ("given", "unlocked"),
    [({}, True), ({"policy": "marconi-online"}, True), ({"policy": "lru"}, False), ({"backend": "stock"}, False)],
)
def test_a_policy_may_evict_the_states_of_running_prompts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], unlocked: bool
) -> None:
    monkeypatch.delenv(slots.UNLOCK, raising=False)
    rest = ["--model-path", str(folder)]
    namespace = flags.parse_engine(rest)
    arguments.complete(namespace, rest, HybridConfig(**given), models.inspect_model(namespace))  # type: ignore[arg-type]
    assert slots.unlocked() is unlocked
    monkeypatch.setenv(slots.UNLOCK, "0")
    arguments.complete(namespace, rest, HybridConfig(**given), models.inspect_model(namespace))  # type: ignore[arg-type]
    assert not slots.unlocked()  # the user's own word


@pytest.mark.parametrize(
    ("strategy", "loop", "disabled"),
    [("auto", "normal", True), ("auto", "overlap", False), ("extra_buffer_lazy", "normal", False)],
)
def test_event_loops_on_a_cpu(folder: Path, strategy: str, loop: str, disabled: bool) -> None:
    rest = ["--model-path", str(folder), "--mamba-radix-cache-strategy", strategy]
    namespace, config = flags.parse_engine(rest), HybridConfig(cpu_event_loop=loop)
    _, parsed = arguments.complete(namespace, rest, config, models.inspect_model(namespace))
    assert parsed.disable_overlap_schedule is disabled


def test_no_buffer_has_no_overlap_loop(folder: Path) -> None:
    rest = ["--model-path", str(folder), "--mamba-radix-cache-strategy", "no_buffer"]
    namespace, config = flags.parse_engine(rest), HybridConfig(cpu_event_loop="overlap")
    with pytest.raises(ConfigError, match="drop --hybrid-cpu-event-loop overlap or add"):
        arguments.complete(namespace, rest, config, models.inspect_model(namespace))


def test_sizes_stay_inside_the_budget(folder: Path) -> None:
    spec = models.inspect_model(flags.parse_engine(["--model-path", str(folder)])).spec
    assert spec is not None
    for budget_bytes in (3_000_000, 10_000_000, 50_000_000, 1_000_000_000):
        tokens, states = cpu_profile.sizes(budget_bytes, spec)
        assert tokens * spec.kv_bytes_per_token + states * spec.checkpoint_bytes <= budget_bytes


def test_help_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_server.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "--hybrid-config" in shown
    assert "--mamba-radix-cache-strategy" in shown


@pytest.mark.parametrize(("more", "expected"), [([], range(20_000, 32_000)), (["--nccl-port", "12345"], [12345])])
def test_the_ranks_meet_at_a_port_that_no_connection_is_given(
    folder: Path, more: list[str], expected: Container[int]
) -> None:
    rest = ["--model-path", str(folder), *more]
    namespace = flags.parse_engine(rest)
    _, parsed = arguments.complete(namespace, rest, HybridConfig(), models.inspect_model(namespace))
    assert parsed.nccl_port in expected


CHANNEL = '{"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ((), "open it with --kv-events-config"),
        (("--kv-events-config", '{"endpoint": "tcp://*:5557"}'), "open it with --kv-events-config"),
        (("--kv-events-config", '{"publisher": "null"}'), "open it with --kv-events-config"),
        (("--kv-events-config", "{"), "must be a JSON object"),
        (
            ("--kv-events-config", CHANNEL, "--disaggregation-mode", "decode"),
            "only our cache takes --hybrid-state-events, .* decode, where no prompt is computed",
        ),
        (("--kv-events-config", CHANNEL, "--disable-radix-cache"), "only our cache takes --hybrid-state-events"),
    ],
)
def test_events_of_states_need_a_channel_and_our_cache_alone(
    monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(compat, "engine_version", lambda: compat.PRIMARY)  # some refuse a host tier
    config = HybridConfig(state_events="published")
    with pytest.raises(ConfigError, match=message):
        settings.check_files(config, early.read(list(line)))
    for line in ([], ["--enable-hierarchical-cache"], ["--disaggregation-mode", "prefill"]):
        settings.check_files(config, early.read(["--kv-events-config", CHANNEL, *line]))
