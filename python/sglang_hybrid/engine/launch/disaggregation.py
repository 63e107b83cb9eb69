"""Servers of prefill/decode pairs (docs/pd.md): what they need beside others, and the environment that suits them."""

from __future__ import annotations

import importlib
import os
import shutil
from ipaddress import ip_address
from typing import Any, NamedTuple

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.launch import environment, platform

TIMEOUT_S = 60
"""For the other side of a pair to say something; SGLang waits for five minutes."""

ENVIRONMENT = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(TIMEOUT_S),
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(TIMEOUT_S),
    # Requests to /v1/messages have no field for a room.
    "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": "1",
}

ENGINE = "SGLANG_HYBRID_TRANSFER_ENGINE"
"""Tells the processes of a server of a pair, by the name of its engine, which hooks to register (`features`)."""

ADDRESS = "SGLANG_HOST_IP"
"""The address that a server tells the others of its pairs, and on which its schedulers listen for them."""

ENGINE_PORTS = (15000, 17000)
"""Of which Mooncake's transfer engine takes two, unless MC_MIN_RPC_PORT and MC_MAX_RPC_PORT say otherwise."""


class Engine(NamedTuple):
    """A transfer engine: what is imported of it, and what installs it."""

    module: str
    packages: str
    library: str = ""


def _engine(backend: str) -> Engine | None:
    """The engine of a backend; None for one that needs none of these, or brings its own."""
    on_gpu = shutil.which("nvidia-smi") is not None
    if backend in ("mooncake", "mooncake_tcp"):
        wheel = "mooncake-transfer-engine" + ("" if on_gpu else "-non-cuda")
        return Engine("mooncake.engine", f"{wheel}==0.3.13", "libibverbs")
    if backend == "nixl":
        return Engine("nixl._api", "nixl==1.5.1 nixl-cu12==1.5.1")
    return None


def backend(on_cpu: bool) -> str:
    """What carries KV and states where nobody chose: TCP between CPUs, RDMA between GPUs."""
    return "mooncake_tcp" if on_cpu else "mooncake"


def missing(chosen: str = "mooncake") -> tuple[str, str] | None:
    """Why the engine of a backend does not load here and what to run, or None if it does."""
    engine = _engine(chosen)
    if engine is None:
        return None
    try:
        importlib.import_module(engine.module)
    except Exception as error:  # whatever a package does wrong while it is imported
        name = engine.module.partition(".")[0]
        absent = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == name
        said = "missing" if absent else " ".join(f"{type(error).__name__}: {error}".split())
        again = "" if absent else "--force-reinstall "
        if engine.library and engine.library in said:
            return said, "run apt-get install -y libibverbs1 (it is linked even where TCP carries everything)"
        remedy = f"run pip install --no-deps {again}{engine.packages}"
        return said, remedy + ("; it needs Debian's libibverbs1 as well" if engine.library else "")
    return None


def prepare(namespace: Any, arguments: list[str]) -> None:
    """For a server of a pair: check that it can hand over, and set the environment where the user did not.

    `arguments` are all of SGLang's. Raises ConfigError. Any other server is left as it is.
    """
    if (namespace.disaggregation_mode or "null") == "null":
        return
    chosen = namespace.disaggregation_transfer_backend or "mooncake"
    require(chosen)
    environment.default({ENGINE: chosen.partition("_")[0], **ENVIRONMENT})
    host = _concrete(namespace.host)
    if host is not None and "HOST_IP" not in os.environ:  # SGLang's other name for it
        environment.default({ADDRESS: host})
    if chosen == "nixl" and platform.wants_cpu(arguments):
        environment.default({"UCX_TLS": "tcp,self"})  # what else UCX would try looks for devices
        if host is not None and ip_address(host).is_loopback:
            environment.default({"UCX_NET_DEVICES": "lo"})


def features() -> list[str]:
    """The rows of `surface` that a process of a server of a pair needs; NIXL's where pools are in the host's memory."""
    engine = os.environ.get(ENGINE)
    here = engine == "mooncake" or (engine == "nixl" and platform.on_cpu())
    return [engine] if engine is not None and here else []


def _concrete(host: str) -> str | None:
    """The one address that `host` is; None for all of them, or for a name."""
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
    return None if address.is_unspecified else str(address)


def require(chosen: str) -> None:
    """Raise ConfigError if the transfer engine of the backend `chosen` does not load."""
    found = missing(chosen)
    if found is not None:
        name = "NIXL" if chosen == "nixl" else "Mooncake's transfer engine"
        raise ConfigError(f"pairs hand over by {name}, which does not load; {found[1]}: {found[0]}")


def note(namespace: Any) -> str | None:
    """What a server of a pair says of its ports, where its transfer engine listens beyond what was asked for."""
    if namespace.disaggregation_mode == "null" or _engine(namespace.disaggregation_transfer_backend) is None:
        return None
    if namespace.disaggregation_transfer_backend == "nixl":
        devices = os.environ.get("UCX_NET_DEVICES")
        if devices == "lo":
            return None
        where = f"on {devices}" if devices else "on every interface; UCX_NET_DEVICES names others"
        return f"the transfer engine listens {where}, and asks nobody who he is; {_FENCE}"
    low = os.environ.get("MC_MIN_RPC_PORT") or os.environ.get("MC_MIN_PRC_PORT") or str(ENGINE_PORTS[0])
    high = os.environ.get("MC_MAX_RPC_PORT") or os.environ.get("MC_MAX_PRC_PORT") or str(ENGINE_PORTS[1])
    return (
        f"the transfer engine listens on all addresses, whatever --host is, on two ports from {low} to {high}, and "
        f"asks nobody who he is; {_FENCE}"
    )


_FENCE = "let only the servers of its pairs reach it, by a firewall or a network of their own (docs/pd.md)"
