"""Whether a checkpoint is quantized, and which type of KV it asks for where `--kv-cache-dtype` is left at auto.

The keys are those that SGLang reads: `kv_cache_scheme` of compressed-tensors and ModelOpt, `kv_cache_quant_algo` of
ModelOpt and FP8 (its `layers/quantization`, `mem_cache/kv_cache_dtype.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SCALED = "fp8_e4m3"
"""The only one that a checkpoint is heard with."""


def asked_kv_dtype(config: Mapping[str, Any], source: object = None) -> str | None:
    """`SCALED` if the checkpoint of `config` has scales for such KV, None if it says nothing.

    `source` is where the configuration was read: ModelOpt's older exports have a file of their own beside it.
    """
    said = _said(config) or _beside(source)
    if said.get("quant_method") == "compressed-tensors":
        scheme = _mapping(said.get("kv_cache_scheme"))
        fixed = scheme.get("strategy") == "tensor" and scheme.get("symmetric", True) and not scheme.get("dynamic")
        return SCALED if _is_8_bit(scheme) and fixed else None
    said = _mapping(said.get("quantization")) or said
    stated: object = said.get("kv_cache_scheme") if "quant_algo" in said else None  # ModelOpt's
    if isinstance(stated, Mapping):
        return SCALED if _is_8_bit(stated) else None
    named: object = stated if isinstance(stated, str) else said.get("kv_cache_quant_algo")
    return SCALED if isinstance(named, str) and named.strip().upper() in ("FP8", "FLOAT8") else None


def method(config: Mapping[str, Any], source: object = None) -> str | None:
    """How the weights of `config` are quantized, None if they are not; `source` as above."""
    said = _said(config) or _beside(source)
    named = said.get("quant_method") or _mapping(said.get("quantization")).get("quant_algo") or said.get("quant_algo")
    return named if isinstance(named, str) else None


def _said(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the configuration says of quantization, in the order in which SGLang looks."""
    text = _mapping(config.get("text_config"))
    found = (config.get("quantization_config"), text.get("quantization_config"), config.get("compression_config"))
    return next((value for value in map(_mapping, found) if value), {})


def _beside(source: object) -> Mapping[str, Any]:
    if isinstance(source, str | Path):
        path = Path(source)
        with suppress(OSError, ValueError):
            folder = path if path.is_dir() else path.parent
            return _mapping(json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8")))
    return {}


def _is_8_bit(scheme: Mapping[str, Any]) -> bool:
    return scheme.get("type") == "float" and scheme.get("num_bits") == 8


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
