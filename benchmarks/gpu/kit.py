"""Where the packages come from: a full installation, or an offline kit for a machine without a package index.

A kit is a folder with archives (`*.tar.xz`) and wheels (`*.whl`), all unpacked into one folder that Python searches
first; SGLang finds our plug-in by the entry points of our wheel. Its `kit.json` has the flags and the environment that
its SGLang needs, and an archive may bring models in `_models` and built kernels in `_jitcache`.
"""

from __future__ import annotations

import json
import os
import tarfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError

SETTINGS = "kit.json"

_OFFLINE = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "SGLANG_HOST_IP": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
_CACHES = {
    "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "HF_HOME": "huggingface",
}  # fmt: skip


@dataclass(frozen=True)
class Packages:
    """Environment variables and server flags with which SGLang and we run; `site` is None for a full installation."""

    environment: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    site: Path | None = None


def unpack(kit: Path, work: Path) -> Packages:
    """Unpack `kit` below `work`, once. Raises ConfigError for a folder that is no kit."""
    archives, wheels = sorted(kit.glob("*.tar.xz")), sorted(kit.glob("*.whl"))
    if not archives and not wheels:
        raise ConfigError(f"a kit has archives (*.tar.xz) or wheels (*.whl), name another folder: {kit}")
    site, done = work / "site", work / "unpacked.json"
    state = {file.name: file.stat().st_size for file in (*archives, *wheels)}
    if not done.is_file() or json.loads(done.read_text()) != state:
        site.mkdir(parents=True, exist_ok=True)
        for archive in archives:
            extract(archive, site)
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as opened_wheel:
                opened_wheel.extractall(site)
        done.write_text(json.dumps(state))
    settings = _settings(kit / SETTINGS)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
    environment = {**_OFFLINE, "PYTHONPATH": path, "TVM_FFI_CACHE_DIR": str(site / "_jitcache")}
    environment |= {name: str(work / folder) for name, folder in _CACHES.items()}
    return Packages({**environment, **settings["environment"]}, settings["flags"], site)


def extract(archive: Path, site: Path) -> None:
    """Unpack one archive of installed packages, their links and modes too."""
    with tarfile.open(archive, "r:xz") as opened:
        opened.extractall(site, filter="fully_trusted")


def _settings(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text()) if file.is_file() else {}
    settings = {"flags": [], "environment": {}, **found} if isinstance(found, dict) else {"flags": found}
    given = (
        [*settings["flags"], *settings.get("environment", {}).values()] if isinstance(settings["flags"], list) else [0]
    )
    if set(settings) != {"flags", "environment"} or not all(isinstance(text, str) for text in given):
        raise ConfigError(f'{file.name} is {{"flags": [...], "environment": {{...}}}} with strings: {found}')
    return settings
