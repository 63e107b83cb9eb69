"""The flags in deploy/ and in the operator's pages are SGLang's or ours."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from sglang_hybrid.engine.launch import flags
from tests.unit.docker.test_deploy import CONTAINER, service
from tests.unit.docker.test_docker_files import only

ROOT = Path(__file__).parents[4]
OF_COMMANDS = {"--url", "--memory-gb", "--model", "--capacity-gb", "--policy", "--simulate", "--states"}
"""Of `sglang-hybrid doctor`, `spec`, `simulate` and `replay`."""


def commands() -> dict[str, list[str]]:
    """The launcher's arguments by who starts it."""
    image = json.loads(only("docker/Dockerfile", "ENTRYPOINT")[-1])
    unit = shlex.split(service("ExecStart"))
    assert image[1:3] == unit[1:3] == ["-m", "sglang_hybrid.launch_server"]
    assert Path(unit[0]).is_absolute()
    return {"kubernetes": [*image[3:], *CONTAINER["args"]], "systemd": unit[3:]}


@pytest.mark.parametrize("starter", commands())
def test_a_server_is_started_with_flags_that_exist(starter: str) -> None:
    words = [word.replace("/etc/sglang-hybrid", str(ROOT / "deploy")) for word in commands()[starter]]
    _, rest = flags.split(words)
    namespace = flags.parse_engine(rest)
    assert (namespace.model_path, namespace.tp_size) == ("Qwen/Qwen3-Next-80B-A3B-Instruct", 4)
    assert namespace.enable_metrics
    assert namespace.enable_cache_report


@pytest.mark.parametrize("page", ["tuning.md", "misses.md", "metrics.md"])
def test_flags_that_an_operator_is_told_of_exist(page: str) -> None:
    parsers = (flags.engine_parser(), flags.hybrid_parser())
    known = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", (ROOT / "docs" / page).read_text("utf-8")))
    assert named
    assert named <= known | OF_COMMANDS
