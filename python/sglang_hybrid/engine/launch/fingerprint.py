"""Which model a server has, whatever it is called: servers that work together have the same one.

A name says little: two folders of one model may be two trainings of it. Reading all weights would take minutes, so a
fingerprint is of the configuration, and of the size and both ends of each file of weights.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

from sglang_hybrid.engine.launch.folder import WEIGHT_SUFFIXES

ENVIRONMENT_KEY = "SGLANG_HYBRID_MODEL_FINGERPRINT"
"""Where the launcher leaves it for `/server_info` (`frontend/admin/access.py`)."""

QUANTIZED_KEY = "SGLANG_HYBRID_QUANTIZED_AS"
"""Where the launcher leaves what the weights are read as; storage has no entries of one reading for another."""

_QUANTIZATION = ("quantization", "quantization_param_path", "modelopt_quant", "rl_quant_profile")
_END_BYTES = 1 << 16
NOT_THE_MODEL = ("_name_or_path", "transformers_version")
"""What a copy of a configuration may have differently."""


def leave(path: str, config: dict[str, Any] | None, namespace: Any) -> None:
    """Put the fingerprint of the model in the folder `path` into the environment; nothing where it is no folder yet.

    Beside it how SGLang's settings, `namespace`, quantize the weights.
    """
    os.environ.pop(ENVIRONMENT_KEY, None)
    os.environ[QUANTIZED_KEY] = json.dumps([getattr(namespace, name, None) for name in _QUANTIZATION])
    if config is not None:
        os.environ[ENVIRONMENT_KEY] = of(Path(path).expanduser(), config)


def of(folder: Path, config: dict[str, Any]) -> str:
    """Sixteen hexadecimal digits."""
    kept = {name: value for name, value in config.items() if name not in NOT_THE_MODEL}
    digest = sha256(json.dumps(kept, sort_keys=True).encode())
    for file in sorted(each for each in folder.iterdir() if each.suffix in WEIGHT_SUFFIXES):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as source:
            digest.update(source.read(_END_BYTES))
            source.seek(max(0, size - _END_BYTES))
            digest.update(source.read(_END_BYTES))
    return digest.hexdigest()[:16]
