"""How a model rotates its keys by position, learned from its modules and proven before anything relies on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.core.errors import ConfigError

_POSITIONS = (3, 1003)
"""Where the proof rotates a key, once directly and once from the first to the second position."""
_PLAIN = ("RotaryEmbedding", "MRotaryEmbedding", "Llama3RotaryEmbedding")
"""Embeddings of SGLang whose angle is position times frequency, whatever the length of the text."""


def frequencies(model: Any) -> tuple[Tensor, bool] | None:
    """(radians per position [rotary dimension / 2], whether pairs are interleaved); None for a model that rotates none.

    Raises ConfigError for an embedding that turns a key by more than its position says, or for several of them.
    """
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    found: dict[tuple[Any, ...], Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, RotaryEmbedding) and "visual" not in name:
            found[type(module).__name__, module.rotary_dim, module.base, module.is_neox_style] = module
    if not found:
        return None
    if len(found) > 1:
        raise ConfigError(f"segments need one rotary embedding for all layers, this model has several: {list(found)}")
    ((kind, *_), module) = found.popitem()
    if kind not in _PLAIN:
        raise ConfigError(f"segments move keys by a rotation that depends on the distance only, not: {kind}")
    turned = module._compute_inv_freq(module.base).double().cpu()
    _prove(module, turned)
    return turned, not module.is_neox_style


def _prove(module: Any, per_position: Tensor) -> None:
    """Turn a key at two positions by the model's code, and from the first to the second by ours: both must agree."""
    from sglang_hybrid_kernels.rerotate_scatter.naive import turned

    size, device = module.head_size, module.cos_sin_cache.device
    key = torch.linspace(-1.0, 1.0, size, device=device, dtype=torch.float32)[None, :].repeat(2, 1)
    last = module.cos_sin_cache.shape[0] - 1
    first, second = (min(position, last) for position in _POSITIONS)
    positions = torch.tensor([first, second], device=device)
    _, made = module.forward_native(positions, key.clone(), key.clone())
    angle = ((second - first) * per_position).to(device)
    moved = turned(made[:1].float(), angle.cos()[None], angle.sin()[None], not module.is_neox_style)
    error = float((moved - made[1:].float()).abs().max())
    if error > (0.02 if module.cos_sin_cache.dtype != torch.float32 else 1e-3):
        raise ConfigError(
            "segments cannot move this model's keys: turned on by the distance they differ from those of their "
            f"position by {error:.3g}; start without --hybrid-segments"
        )
