"""Servers of prefill/decode pairs (docs/pd.md): what they need beside others, and the environment that suits them."""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any

from sglang_hybrid.core.errors import ConfigError

TIMEOUT_S = 60
"""For the other side of a pair to say something; SGLang waits for five minutes."""

ENVIRONMENT = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(TIMEOUT_S),
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(TIMEOUT_S),
    # Requests to /v1/messages have no field for a room.
    "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": "1",
}

_ENGINE = "mooncake.engine"
_VERSION = "0.3.13"
_LIBRARY = "libibverbs"


def backend(on_cpu: bool) -> str:
    """What carries KV and states where nobody chose: TCP between CPUs, RDMA between GPUs."""
    return "mooncake_tcp" if on_cpu else "mooncake"


def missing() -> tuple[str, str] | None:
    """Why the transfer engine does not load here and what to run, or None if it does."""
    try:
        importlib.import_module(_ENGINE)
    except Exception as error:  # whatever a package does wrong while it is imported
        absent = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "mooncake"
        said = "missing" if absent else " ".join(f"{type(error).__name__}: {error}".split())
        wheel = "mooncake-transfer-engine" + ("" if shutil.which("nvidia-smi") else "-non-cuda")
        again = "" if absent else "--force-reinstall "
        if _LIBRARY in said:
            return said, "run apt-get install -y libibverbs1 (it is linked even where TCP carries everything)"
        return said, f"run pip install --no-deps {again}{wheel}=={_VERSION}; it needs Debian's libibverbs1 as well"
    return None


def prepare(namespace: Any) -> None:
    """For a server of a pair: check that it can hand over, and set the environment where the user did not.

    Raises ConfigError. Any other server is left as it is.
    """
    if (namespace.disaggregation_mode or "null") == "null":
        return
    require(namespace.disaggregation_transfer_backend)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def require(chosen: str | None) -> None:
    """Raise ConfigError if the transfer engine of a backend that needs one does not load."""
    if chosen in (None, "mooncake", "mooncake_tcp") and (found := missing()) is not None:
        raise ConfigError(f"pairs hand over by Mooncake's transfer engine, which does not load; {found[1]}: {found[0]}")


def note(namespace: Any) -> str | None:
    """What a server of a pair says of its ports."""
    if namespace.disaggregation_mode == "null":
        return None
    return (
        "the transfer engine listens on all addresses, whatever --host is, and asks nobody who he is; let only the "
        "servers of its pairs reach this machine on other ports than --port (docs/pd.md)"
    )
