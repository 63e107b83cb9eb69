"""What HiCache cannot do with a model with recurrent states, or on a CPU, said before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.layers import LatentAttention
from sglang_hybrid.core.machine import memory_bytes
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.hicache import copies
from sglang_hybrid.engine.launch.flags import attention_groups
from sglang_hybrid.engine.launch.models import Model

_FOLDER, _USUAL = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "/tmp/hicache"
_PAGED = ("page_first", "page_first_direct", "page_first_kv_split")
"""Layouts of host memory in which a state has a place."""

_LEFT_BEHIND = {
    "Qwen4ExpForConditionalGeneration": "the index of its attention and the states of its n-gram convolution",
    "Glm5NextForConditionalGeneration": "the index of its attention",
}
"""What of a model SGLang copies to no host pool before 0.5.23 (sgl-project/sglang#39862, #38031)."""

_STATES_OF_RANK_0 = {"hf3fs": "", "nixl": "0.5.23"}
"""Storages that keep one state for all ranks of a model with latent attention, and the version that mended it."""


def check(namespace: Any, model: Model, on_cpu: bool) -> None:
    """Raise ConfigError if a host tier was asked for and cannot work; `namespace` are SGLang's final settings."""
    if not namespace.enable_hierarchical_cache:
        return
    if namespace.disable_radix_cache:
        raise _refusal("there is no cache to back; drop one of the two flags", "--disable-radix-cache")
    if namespace.disaggregation_mode == "decode":
        raise _refusal(
            "a tier behind the KV of a server that decodes was not run; drop one of the two flags",
            "--disaggregation-mode decode",
        )
    if (namespace.hicache_ratio or 1) <= 0 or namespace.hicache_size < 0:
        raise _refusal("the host tier needs a size of more than zero", _size(namespace))
    if namespace.hicache_size * 1e9 > (here := memory_bytes()):
        raise _refusal(
            f"the size is in GB, and this machine has {here / 1e9:.1f} for a server",
            f"--hicache-size {namespace.hicache_size}",
        )
    if on_cpu:
        _check_cpu(namespace)
    if getattr(namespace, "hicache_storage_backend", None) == "file":
        _check_folder(Path(os.environ.get(_FOLDER) or _USUAL))
    if model.architecture in _LEFT_BEHIND and not compat.at_least("0.5.23"):
        raise _refusal(
            f"SGLang {compat.engine_version()} leaves {_LEFT_BEHIND[model.architecture]} on the device, and a restored "
            "prefix would go on from those of another request; install 0.5.23 or drop the flag",
            model.architecture,
        )
    if model.spec is not None and model.spec.checkpoint_bytes:
        _check_states(namespace, model.spec)


def _check_states(namespace: Any, spec: ModelSpec) -> None:
    """Raise ConfigError for a tier that does not hold recurrent states, or not those of every rank."""
    if getattr(namespace, "hicache_host_memory_mode", "cache") != "cache":
        raise _refusal(
            "SGLang stages no recurrent states; drop the flag",
            f"--hicache-host-memory-mode {namespace.hicache_host_memory_mode}",
        )
    if namespace.hicache_mem_layout not in _PAGED:
        raise _refusal(
            f"recurrent states lie page by page; choose one of {', '.join(_PAGED)}",
            f"--hicache-mem-layout {namespace.hicache_mem_layout}",
        )
    storage, mended = namespace.hicache_storage_backend, _STATES_OF_RANK_0.get(namespace.hicache_storage_backend)
    if (
        mended is not None
        and not (mended and compat.at_least(mended))
        and int(namespace.tp_size or 1) > attention_groups(namespace)
        and any(isinstance(layer, LatentAttention) for layer in spec.layers)
    ):
        raise _refusal(
            f"SGLang {compat.engine_version()} keeps one state there for all ranks of a model with latent attention: "
            "each would go on from that of rank 0; choose file or mooncake",
            f"--hicache-storage-backend {storage}",
        )
    if getattr(namespace, "radix_cache_backend", None) is not None:
        require_version()


def note(namespace: Any, model: Model) -> str:
    """What a server with such storage should know; "" for nothing."""
    waits = namespace.hicache_storage_prefetch_policy != "best_effort"
    if namespace.hicache_storage_backend is None or waits or model.spec is None or not model.spec.checkpoint_bytes:
        return ""
    return (
        "with --hicache-storage-prefetch-policy best_effort a request that need not queue is served nothing from "
        "storage: its prefix is of no use without the state at its end, which is read last; timeout and wait_complete "
        "wait for it"
    )


def require_version() -> None:
    """Raise ConfigError unless what our cache guards a restore with was made for this SGLang (`tier.py`)."""
    if not compat.complete():
        raise _refusal(
            "with this SGLang a restore that finds no slot for a state ends the scheduler, or leaves a request without "
            f"its state and its answer wrong; install SGLang {' or '.join(compat.COMPLETE)}, or drop the flag",
            compat.engine_version(),
        )


def _check_cpu(namespace: Any) -> None:
    if not compat.has_host_pools():
        raise _refusal(
            f"on a CPU it was run with SGLang {' and '.join(compat.COMPLETE)} only; install one or drop the flag",
            compat.engine_version(),
        )
    asked = namespace.hicache_io_backend, namespace.hicache_mem_layout
    if asked != (copies.IO_BACKEND, copies.LAYOUT):
        raise _refusal(
            f"on a CPU it has plain copies only: --hicache-io-backend {copies.IO_BACKEND} --hicache-mem-layout "
            f"{copies.LAYOUT}, the defaults there",
            f"--hicache-io-backend {asked[0]} --hicache-mem-layout {asked[1]}",
        )
    if namespace.hicache_storage_backend not in (None, "file"):
        raise _refusal(
            "on a CPU files are the only storage that was run; choose --hicache-storage-backend file",
            f"--hicache-storage-backend {namespace.hicache_storage_backend}",
        )


def _check_folder(folder: Path) -> None:
    """Make the folder of a storage of files: without it the scheduler would end, and what cannot be written is lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise _refusal(f"no file of the storage can be written; name a folder of this user's in {_FOLDER}", str(folder))


def _size(namespace: Any) -> str:
    if namespace.hicache_size < 0:
        return f"--hicache-size {namespace.hicache_size}"
    return f"--hicache-ratio {namespace.hicache_ratio}"


def _refusal(reason: str, value: str) -> ConfigError:
    return ConfigError(f"--enable-hierarchical-cache cannot serve this: {reason}: {value}")
