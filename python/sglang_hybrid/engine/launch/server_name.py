"""The name of a server, one of its own from each start to its end, which all of its processes know."""

from __future__ import annotations

import os
import secrets

ENVIRONMENT_KEY = "SGLANG_HYBRID_SERVER"


def leave() -> None:
    """Put a new name of this server into the environment."""
    os.environ[ENVIRONMENT_KEY] = secrets.token_hex(8)
