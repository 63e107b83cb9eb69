"""What `sglang_hybrid.Engine` makes of its keywords, before anything starts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import sglang_hybrid
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import offline
from sglang_hybrid.engine.frontend.server import loop


def test_ours_and_sglangs() -> None:
    config, given = offline.split({"model_path": "m", "hybrid_policy": "lru", "tp_size": 2})
    assert config.policy == "lru"
    assert given == {"model_path": "m", "tp_size": 2}


def test_keywords_as_a_command_line() -> None:
    said = {"model_path": "m", "enable_metrics": True, "disable_radix_cache": False, "dtype": None, "max_loras": 3}
    said |= {"lora_paths": ["a", "b"], "custom_sigquit_handler": print}
    assert offline.as_flags(said) == [
        *("--model-path", "m", "--enable-metrics", "--max-loras", "3", "--lora-paths", "a", "b")
    ]


def test_keywords_that_hold_several_things() -> None:
    """Or the launcher's checks and defaults, such as adapters' on a CPU, would not see them."""
    adapters = {"lora_paths": {"a": "/x", "b": "/y"}}
    assert offline.as_flags(adapters) == ["--lora-paths", "a=/x", "b=/y"]
    adapter = {"lora_name": "a", "lora_path": "/x"}
    assert offline.as_flags({"lora_paths": [adapter]}) == ["--lora-paths", json.dumps(adapter)]
    graphs = {"prefill": {"backend": "disabled"}}
    assert offline.as_flags({"cuda_graph_config": graphs}) == ["--cuda-graph-config", json.dumps(graphs)]
    assert offline.as_flags({"lora_paths": [], "lora_target_modules": ()}) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"hybrid_polisy": "lru"}, "did you mean 'policy'.*polisy"),
        ({"hybrid_policy": "gdsf"}, "the policy is the simulator's.*gdsf"),
        ({"server_args": object()}, "one by one, not as server_args"),
        ({"model_path": "./absent"}, "absent"),
    ],
)
def test_what_the_launcher_refuses_is_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sglang_hybrid.Engine(**arguments)


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = "import sys, sglang_hybrid; print(sorted({'torch', 'sglang', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_second_event_loop_is_refused() -> None:
    """SGLang would wait in it for answers that arrive in the first."""
    manager = SimpleNamespace(event_loop=None)

    async def call() -> None:
        loop.require_same(manager)
        manager.event_loop = manager.event_loop or asyncio.get_running_loop()
        loop.require_same(manager)

    asyncio.run(call())
    loop.require_same(manager)  # outside of any, SGLang takes its own
    with pytest.raises(RuntimeError, match=r"one asyncio\.run"):
        asyncio.run(call())
