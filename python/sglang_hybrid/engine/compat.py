"""Everything that depends on the SGLang version: the supported range, the doors we enter by, and names that moved."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from typing import Any

from sglang_hybrid.core.errors import IncompatibleEngine

OLDEST, NEWEST_EXCLUSIVE = (0, 5, 17), (0, 5, 24)
PRIMARY = "0.5.21"

DOORS = (
    "sglang.launch_server:run_server",
    "sglang.srt.server_args:prepare_server_args",
    "sglang.srt.plugins:load_plugins",
    "sglang.srt.plugins.hook_registry:HookRegistry.register",
    "sglang.srt.mem_cache.registry:register_radix_cache_backend",
    "sglang.srt.mem_cache.registry:default_radix_cache_factory",
    "sglang.srt.mem_cache.cache_init_params:CacheInitParams",
    "sglang.srt.mem_cache.unified_cache.components:MambaComponent",
    "sglang.srt.managers.tokenizer_manager:SignalHandler.running_phase_sigquit_handler",
)
"""What this package calls or subclasses; a name that is missing stops the start, never degrades it silently."""

CHILD_DIED = "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler"
"""Runs in the HTTP process when a scheduler or detokenizer process has died."""

HOST_POOLS = (
    "sglang.srt.mem_cache.pool_host.mha:MHATokenToKVPoolHost",
    "sglang.srt.mem_cache.pool_host.mamba:MambaPoolHost",
)
HOST_BASE = "sglang.srt.mem_cache.pool_host.base:HICACHE_HOST_MEMORY_RESERVE_BYTES"
HOST_REGISTER = "sglang.srt.mem_cache.pool_host.common:_cuda_host_register"
"""HiCache's pools in host memory, what they leave free of it, and how they lock it; 0.5.17 has them elsewhere."""


def engine_version() -> str:
    """Version of the installed SGLang; raises IncompatibleEngine if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise IncompatibleEngine(
            f"SGLang is not installed; run scripts/setup or install sglang=={PRIMARY}: no distribution 'sglang'"
        ) from None


def check_version(version: str) -> None:
    """Raise IncompatibleEngine unless `version` lies in the supported range."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None or not OLDEST <= tuple(int(part) for part in match.groups()) < NEWEST_EXCLUSIVE:
        oldest, newest = ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST_EXCLUSIVE))
        raise IncompatibleEngine(
            f"this release works with SGLang >= {oldest} and < {newest}; install sglang=={PRIMARY}: found {version}"
        )


def missing_doors(doors: tuple[str, ...]) -> list[str]:
    """The doors that the installed SGLang does not have, as 'module:attribute'."""
    missing = []
    for door in doors:
        module_name, _, path = door.partition(":")
        try:
            target: Any = importlib.import_module(module_name)
            for attribute in path.split("."):
                target = getattr(target, attribute)
        except (ImportError, AttributeError):
            missing.append(door)
    return missing


def check_engine() -> str:
    """Return SGLang's version if it is supported and has every door; raise IncompatibleEngine otherwise."""
    version = engine_version()
    check_version(version)
    if missing := missing_doors(DOORS):
        raise IncompatibleEngine(
            f"SGLang {version} lacks what this release builds on; install sglang=={PRIMARY}: {', '.join(missing)}"
        )
    return version


def extra_buffer_validator_path() -> str:
    """Where SGLang refuses the extra_buffer strategy on platforms without its Triton kernels."""
    if importlib.util.find_spec("sglang.srt.arg_groups") and importlib.util.find_spec(
        "sglang.srt.arg_groups.mamba_hook"
    ):
        return "sglang.srt.arg_groups.mamba_hook.validate_mamba_extra_buffer"
    return "sglang.srt.server_args.ServerArgs._validate_mamba_extra_buffer"  # 0.5.17


def has_host_pools() -> bool:
    """Whether this version keeps HiCache's host pools where the CPU platform can serve them."""
    return not missing_doors((*HOST_POOLS, HOST_BASE, HOST_REGISTER))


def resolved(server_args: Any) -> Any:
    """The settings a server really runs with: newer versions keep `server_args` as the user's raw input."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args  # 0.5.17 resolves in place
    return resolving_view(server_args)


def checkpoint_grid(server_args: Any) -> int:
    """Tokens between the positions at which extra_buffer can save a state; call it in a scheduler process."""
    try:
        from sglang.srt.runtime_context import mamba_cache_chunk_size
    except ImportError:
        return int(server_args.mamba_cache_chunk_size)  # 0.5.17
    return int(mamba_cache_chunk_size())


def state_of(req: Any) -> Any:
    """The object that holds a request's state slots (`mamba_pool_idx` and its like)."""
    kv = getattr(req, "kv", None)
    return kv if hasattr(kv, "mamba_pool_idx") else req  # 0.5.17 keeps them on the request
