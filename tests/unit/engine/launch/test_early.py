"""What the launcher refuses before it imports SGLang."""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.process import free_port
from sglang_hybrid.engine.launch import early, flags, folder
from tests.engine.configs import QWEN3_NEXT, write

LAUNCH = """
import sys
from sglang_hybrid import launch_server
status = launch_server.main(sys.argv[1:])
print(status, sorted({"sglang", "torch"} & set(sys.modules)))
"""


def launched(*arguments: str, cwd: Path) -> tuple[str, str]:
    """What a launcher in a process of its own ends with, and the line it says."""
    if not {"--port", "--config"} & set(arguments):
        arguments = (*arguments, "--port", str(free_port()))  # whatever else listens on this machine
    command = [sys.executable, "-c", LAUNCH, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    return done.stdout.strip(), done.stderr.strip()


def safetensors(file: Path, promised: int, size: int) -> None:
    """A weight file with one tensor, whose header promises `promised` bytes of data and which has `size`."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [promised], "data_offsets": [0, promised]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def cut(model: Path) -> None:
    safetensors(model / "model.safetensors", 1000, 400)


def index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')


def large_file_pointer(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")


def no_configuration(model: Path) -> None:
    (model / "config.json").unlink()


def half_a_configuration(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": [')


def unknown_architecture(model: Path) -> None:
    write(model, {**QWEN3_NEXT, "architectures": ["Qwen3NextestForCausalLM"]})


def whole(_: Path) -> None: ...


@pytest.mark.parametrize(
    ("change", "given", "said"),
    [
        (whole, ("--port", "99999"), "--port must be from 1 to 65535: 99999"),
        (whole, ("--port", "-1"), "--port must be from 1 to 65535: -1"),
        (whole, ("--model-path", "models/gdm"), "did you mean models/gdn? models/gdm"),
        (whole, ("--model-path", "models/nope"), "did you mean models/gdn? models/nope"),
        (whole, ("--model-path", "model/gdn"), "did you mean models/gdn? model/gdn"),
        (whole, ("--model-path", "other/gdn"), "other is a folder here: other/gdn"),
        (no_configuration, (), "has no config.json: models/gdn"),
        (half_a_configuration, (), "not valid JSON"),
        (unknown_architecture, (), "the nearest it knows: Qwen3NextForCausalLM"),
        (
            cut,
            (),
            "cut short, its header promises 1,074 bytes; fetch it again: models/gdn/model.safetensors (474",
        ),
        (index, (), "fetch them: model-2.safetensors"),
        (large_file_pointer, (), "run git lfs pull: models/gdn/model.safetensors"),
        (no_tokenizer, (), "or --skip-tokenizer-init for requests in token ids: models/gdn"),
        (whole, ("--hybrid-seed-prefixes", "none.jsonl"), "none.jsonl"),
        (whole, ("--hybrid-request-log", "models"), "choose another file: models"),
        (whole, ("--config", "none.yaml"), "no such configuration file"),
        (whole, ("--config", "server.yaml"), "--port must be from 1 to 65535: 70000"),
    ],
)
def test_it_is_said_before_sglang_and_torch_are_imported(
    tmp_path: Path, change: Callable[[Path], None], given: tuple[str, ...], said: str
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "server.yaml").write_text("port: 70000\nlog-level: info\n")
    change(write(tmp_path / "models" / "gdn", QWEN3_NEXT))
    status, error = launched("--model-path", "models/gdn", *given, cwd=tmp_path)
    assert error.startswith("error: ")
    assert said in error
    assert "\n" not in error
    assert status == "2 []"


def test_a_port_in_use(tmp_path: Path) -> None:
    model = write(tmp_path / "gdn", QWEN3_NEXT)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        status, error = launched("--model-path", str(model), "--port", port, cwd=tmp_path)
    assert status == "2 []"
    assert f"pass another --port: {port}" in error


@pytest.mark.parametrize("asked", [("--tp", "3"), ("--tp-size", "99"), ("--tensor-parallel-size=3",)])
def test_ranks_are_counted_before_sglang_is_imported(tmp_path: Path, asked: tuple[str, ...]) -> None:
    """Only PyTorch, which knows whether this is a GPU machine, has been asked by then."""
    model = write(tmp_path / "gdn", QWEN3_NEXT)
    line = ("--model-path", str(model), "--device", "cpu", "--port", "31997", *asked)
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) >= 3:
        line = (*line, "--pp-size", "1000")
    status, error = launched(*line, cwd=tmp_path)
    assert status in ("2 []", "2 ['torch']")
    assert "each rank takes one; ask for fewer ranks, or name the cores of each rank" in error


@pytest.mark.parametrize(
    ("arguments", "bound", "refused"),
    [
        ("--tp 2", None, False),
        ("--tp 3", None, True),
        ("--tp 2 --pp 2", None, True),
        ("--tp 2 --dp 2", None, True),
        ("--tp 2 --dp 2 --enable-dp-attention", None, False),
        ("--tp 3", "0|1|2", False),
        ("--tp 3", "0|1", True),
        ("--tp 0", None, True),
    ],
)
def test_a_rank_needs_cores(tmp_path: Path, arguments: str, bound: str | None, refused: bool) -> None:
    for node, cores in enumerate(("0-3", "4-7", "")):  # the third has memory only
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    environment = {} if bound is None else {"SGLANG_CPU_OMP_THREADS_BIND": bound}
    namespace = early.read(arguments.split())
    if not refused:
        early.check_ranks(namespace, environment, tmp_path)
        return
    with pytest.raises(ConfigError):
        early.check_ranks(namespace, environment, tmp_path)


@pytest.mark.parametrize("arguments", [("Org/Model-8B",), ("Org/Model-8B", "--config", "x.yaml")])
def test_a_hub_name_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text("enable-metrics: true\nport: 31996\n")
    namespace = early.read(["--model-path", *arguments])
    folder.refuse_typo(namespace.model_path)
    folder.check_tokenizer(namespace)
    assert namespace.port == (31996 if "--config" in arguments else 30000)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not safetensors"),
        (b"\xff" * 40, "is not safetensors"),
        ((100).to_bytes(8, "little") + b"{", "promises 108 bytes or more"),
        ((2).to_bytes(8, "little") + b"[]", "holds no JSON object"),
        ((2).to_bytes(8, "little") + b"{{", "is damaged"),
        ((8).to_bytes(8, "little") + b'{"a":{}}', "header of a weight file is damaged"),
        ((2).to_bytes(8, "little") + b"{}more", "too long"),
    ],
)
def test_damaged_weights(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        folder.check_weights(tmp_path)


def test_whole_weights_pass(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", 1000, 1000)
    folder.check_weights(tmp_path)


def test_a_tokenizer_elsewhere_is_enough(tmp_path: Path) -> None:
    settings = {"model_path": str(tmp_path), "tokenizer_path": None, "skip_tokenizer_init": False}
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        folder.check_tokenizer(argparse.Namespace(**settings))
    elsewhere = write(tmp_path / "elsewhere", QWEN3_NEXT)
    folder.check_tokenizer(argparse.Namespace(**settings | {"tokenizer_path": str(elsewhere)}))
    folder.check_tokenizer(argparse.Namespace(**settings | {"skip_tokenizer_init": True}))


def test_what_a_file_of_sglang_says_is_given(tmp_path: Path) -> None:
    """Defaults of ours stand behind it, as they do behind flags, however abbreviated."""
    file = tmp_path / "server.yaml"
    file.write_text("attention-backend: intel_amx\nmem-fraction-static: 0.5\nenable-mixed-chunk: true\n")
    line = ["--model-path", "m", "--config", str(file), "--max-running-req", "3"]
    found = flags.given(line)
    wanted = {"model_path", "attention_backend", "mem_fraction_static", "enable_mixed_chunk", "max_running_requests"}
    assert wanted <= found
    assert not {"page_size", "port", "lora_backend"} & found
    file.write_text("hybrid-policy: lru\n")
    with pytest.raises(ConfigError, match="has no settings of ours; use --hybrid-config: --hybrid-policy"):
        flags.parse_engine(line)


def test_a_machine_without_lscpu_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install util-linux.*" + re.escape(str(tmp_path))):
        early.check_programs()
