"""Who may call and read what: gaps in SGLang's use of API keys."""

from __future__ import annotations

import os
from typing import Any

from sglang_hybrid import __version__
from sglang_hybrid.engine.launch.fingerprint import ENVIRONMENT_KEY

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
    what servers that work together have alike and SGLang does not tell: our release, the type of convolution windows,
    the fingerprint of the model."""
    if not isinstance(made, dict) or "internal_states" not in made:
        return None
    made = {**made, "sglang_hybrid": __version__}
    for name, variable in (("mamba_conv_dtype", "SGLANG_MAMBA_CONV_DTYPE"), ("model_fingerprint", ENVIRONMENT_KEY)):
        if value := os.environ.get(variable):
            made[name] = value
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
