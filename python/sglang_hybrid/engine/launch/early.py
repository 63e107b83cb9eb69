"""The checks that need neither SGLang nor PyTorch: a mistyped port or path is said before seconds of imports."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_hybrid.core.config import HybridConfig, read_mapping
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.machine import memory_bytes
from sglang_hybrid.engine.launch import flags, folder, models, settings

_NODES = Path("/sys/devices/system/node")


def read(arguments: list[str]) -> argparse.Namespace:
    """The few settings of SGLang that are checked here, from its command line and its `--config` file.

    Flags that are not known here are left to SGLang's own parser, which reads the same line later.
    """
    parser = flags.Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--json-model-override-args")
    parser.add_argument("--tokenizer-path")
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1)
    parser.add_argument("--pp-size", "--pipeline-parallel-size", "--pp", type=int, default=1)
    parser.add_argument("--dp-size", "--data-parallel-size", "--dp", type=int, default=1)
    parser.add_argument("--enable-dp-attention", action="store_true")
    parser.add_argument("--disable-radix-cache", action="store_true")
    parser.add_argument("--kv-events-config")
    parser.add_argument("--enable-hierarchical-cache", "--enable-hicache", action="store_true")
    parser.add_argument("--disaggregation-mode")
    parser.add_argument("--disaggregation-transfer-backend")
    namespace, _ = parser.parse_known_args(arguments)
    if namespace.config is not None:
        namespace, _ = parser.parse_known_args([*_as_flags(read_mapping(namespace.config)), *arguments])
    return namespace


def check(namespace: Any, config: HybridConfig) -> None:
    """Raise ConfigError for a model folder, a tokenizer or a file that cannot be used."""
    settings.check_files(config, namespace)
    if namespace.model_path is not None:
        models.inspect_model(namespace)
        folder.check_tokenizer(namespace)


def check_model(namespace: Any) -> None:
    """On a CPU: raise ConfigError for a model that needs a GPU."""
    if namespace.model_path is not None:
        models.check_computable(models.inspect_model(namespace))


def check_memory(config: HybridConfig, namespace: Any) -> None:
    """On a CPU: raise ConfigError if the machine, or the container or unit that this is, has less than the budgets."""
    here = memory_bytes()
    replicas = flags.replicas(namespace.dp_size, namespace.enable_dp_attention)
    if config.cpu_memory_bytes * replicas > here:
        raise ConfigError(
            f"the memory for KV and states is more than there is ({here / 1e9:.1f} GB, of which a server takes about "
            f"2.5 by itself); lower --hybrid-cpu-memory-gb: {config.cpu_memory_gb:g}"
            f"{f' for each of --dp-size {replicas}' if replicas > 1 else ''}"
        )


def check_programs() -> None:
    """On a CPU: raise ConfigError without the program that SGLang asks for cores; it would end in a traceback."""
    if shutil.which("lscpu") is None:
        raise ConfigError(
            "SGLang asks lscpu for the cores of this machine; install util-linux, or put it into PATH: "
            f"{os.environ.get('PATH', '')}"
        )


def check_ranks(namespace: Any, environment: Mapping[str, str] = os.environ, nodes: Path = _NODES) -> None:
    """On a CPU: raise ConfigError unless every rank gets cores of its own.

    SGLang gives each rank one NUMA node, or one entry of SGLANG_CPU_OMP_THREADS_BIND, and asserts it in the rank.
    """
    ranks = {"--tp-size": namespace.tp_size, "--pp-size": namespace.pp_size, "--dp-size": namespace.dp_size}
    for flag, size in ranks.items():
        if size < 1:
            raise ConfigError(f"{flag} must be 1 or more: {size}")
    wanted = namespace.tp_size * namespace.pp_size * flags.replicas(namespace.dp_size, namespace.enable_dp_attention)
    asked = " ".join(f"{flag} {size}" for flag, size in ranks.items() if size > 1)
    bound = environment.get("SGLANG_CPU_OMP_THREADS_BIND", "all")
    if bound != "all":
        if wanted > (entries := len(bound.split("|"))):
            raise ConfigError(
                f"SGLANG_CPU_OMP_THREADS_BIND gives cores to {entries} ranks; add entries to it, separated by '|', "
                f"or ask for fewer ranks: {asked}"
            )
        return
    known = max(1, sum(bool(file.read_text().strip()) for file in nodes.glob("node[0-9]*/cpulist")))
    if wanted > known:
        raise ConfigError(
            f"this machine has {known} NUMA node(s), and each rank takes one; ask for fewer ranks, or name the cores "
            f"of each rank, for example SGLANG_CPU_OMP_THREADS_BIND='{_example(wanted)}': {asked}"
        )


def _example(ranks: int) -> str:
    cores = os.cpu_count() or 1
    return "|".join(str(rank) for rank in range(ranks)) if ranks <= cores else "|".join(["0", "1", "..."])


def _as_flags(mapping: Mapping[str, Any]) -> list[str]:
    """The flags that SGLang makes of its configuration file."""
    made: list[str] = []
    for key, value in mapping.items():
        if isinstance(value, bool):
            made += [f"--{key}"] if value else []
        elif isinstance(value, (str, int, float)):
            made.append(f"--{key}={value}")
        elif isinstance(value, dict):
            made.append(f"--{key}={json.dumps(value)}")
    return made
