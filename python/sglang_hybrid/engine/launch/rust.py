"""SGLang's server in Rust (`SGLANG_RUST_SERVER=1`): which of SGLang's versions and of our features are served by it."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import environment
from sglang_hybrid.engine.launch.flags import spelled
from sglang_hybrid.engine.surface.rows import number

VARIABLE = "SGLANG_RUST_SERVER"
OLDEST = "0.5.23"

FEATURE = "rust"
"""Of the rows of `surface` that are hooked with it alone."""

_UNGUARDED = ("api_key", "admin_api_key", "ssl_keyfile", "ssl_certfile")
"""SGLang's server in Rust takes them and answers whoever asks, in plain HTTP."""

NOTE = (
    f"{VARIABLE}: SGLang's server in Rust answers over this cache. Marks and hints of chats, reasons of misses in "
    "answers and the pages of this package are of the server in Python (docs/clients.md)"
)


def asked() -> bool:
    return environment.is_on(VARIABLE)


def features() -> list[str]:
    return [FEATURE] if asked() else []


def check(namespace: Any, config: HybridConfig) -> None:
    """Raise ConfigError for what that server would ignore; `namespace` are SGLang's arguments."""
    if not asked():
        return
    version = compat.engine_version()
    if number(version) < number(OLDEST):
        raise ConfigError(
            "this SGLang has no server in Rust, or one that drops cache salts, and tenants would share a cache; use "
            f"SGLang {OLDEST} or unset {VARIABLE}: {version}"
        )
    for name in _UNGUARDED:
        if getattr(namespace, name, None):
            raise ConfigError(
                "SGLang's server in Rust asks nobody for a key and has no TLS; put a proxy in front and drop the flag, "
                f"or unset {VARIABLE}: {spelled(name)}"
            )
    needs = {
        "--hybrid-segments on": config.segments == "on",
        f"--disaggregation-mode {namespace.disaggregation_mode}": namespace.disaggregation_mode != "null",
    }
    for flag, given in needs.items():
        if given:
            raise ConfigError(f"this needs SGLang's server in Python; unset {VARIABLE} or drop: {flag}")


def note() -> str | None:
    return NOTE if asked() else None
