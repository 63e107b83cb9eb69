"""Who may call and read what: gaps in SGLang's use of API keys."""

from __future__ import annotations

import os
from typing import Any

ADMINISTRATIVE = ("/load_lora_adapter_from_tensors",)
"""Changes the model for everybody, yet asks for a client's key only (0.5.17 and 0.5.21)."""

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
MASK = "***"


def decide(**asked: Any) -> tuple[tuple[()], dict[str, Any]]:
    """Ask for the administrator's key where it is due; a header beyond ASCII is a wrong key, not a 500."""
    from sglang.srt.utils.auth import AuthLevel

    if asked["path"] in ADMINISTRATIVE:
        asked["auth_level"] = AuthLevel.ADMIN_OPTIONAL
    if not (asked["authorization_header"] or "").isascii():
        asked["authorization_header"] = None
    return (), asked


def mask(made: Any, *_: Any, **__: Any) -> Any:
    """`/server_info` without the keys it shows to whoever holds a client's, as fields and in the launch command; with
    the type of convolution windows."""
    if not isinstance(made, dict) or "internal_states" not in made:
        return None
    # The type of convolution windows is no argument of SGLang's; servers that hand states over have it alike.
    if dtype := os.environ.get("SGLANG_MAMBA_CONV_DTYPE"):
        made = {**made, "mamba_conv_dtype": dtype}
    secrets = {made[name] for name in SECRETS if isinstance(made.get(name), str) and made[name]}
    return _masked(made, secrets)


def _masked(value: Any, secrets: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: MASK if key in SECRETS and each else _masked(each, secrets) for key, each in value.items()}
    if isinstance(value, list):
        return [_masked(each, secrets) for each in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
    return value
