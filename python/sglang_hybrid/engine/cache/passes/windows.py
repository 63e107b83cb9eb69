"""Further states of a prefill of LFM2, whose layers keep the last inputs of a convolution and nothing else.

Such a state is known at any token: it is cut out of what the convolution is given. No kernel and no mask of SGLang's is
involved. A layer says that it ran by setting `written`: one inside a CUDA graph does not get here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_hybrid.engine.cache.passes import forward
from sglang_hybrid.engine.cache.requests import Checkpoint


@dataclass(frozen=True)
class _Cuts:
    """Of the running pass: tokens of each window [n, width], slots [n], and whose they are."""

    tokens: Any
    slots: Any
    checkpoints: tuple[Checkpoint, ...]


_cuts: _Cuts | None = None


def plan(_: Any, backend: Any, forward_batch: Any) -> None:
    """AFTER hook of ShortConvAttnBackend.init_forward_metadata: which windows of the coming pass to keep."""
    global _cuts
    import torch

    _cuts = None
    metadata = backend.forward_metadata
    pending = forward.take(metadata, forward_batch)
    if pending is None:
        return
    width = int(backend.conv_states_shape[-1])
    rows = [(checkpoint, at) for _, checkpoint, _, at in pending.reached(width)]
    if not rows:
        return
    device = metadata.query_start_loc.device
    host = torch.tensor([range(at - width, at) for _, at in rows], pin_memory=device.type == "cuda")
    kept = tuple(checkpoint for checkpoint, _ in rows)
    slots = backend._translate_mamba_indices(torch.cat([checkpoint.slot.view(-1) for checkpoint in kept]).long())
    _cuts = _Cuts(host.to(device, non_blocking=True), slots, kept)


def save(original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of the convolution of a prefill, x [channels, tokens]: cut the windows into `conv_states`."""
    if _cuts is not None:
        _write(kwargs["conv_states"], x[:, _cuts.tokens].transpose(0, 1), _cuts)
    return original(x, *args, **kwargs)


def save_fused(original: Any, b: Any, c: Any, x: Any, weight: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of the fused kernel that a prefill of LFM2-8B-A1B runs on H100s; b, c, x [tokens, channels].

    What is convolved is b * x, rounded as in the kernel.
    """
    if _cuts is not None:
        _write(states, (b[_cuts.tokens] * x[_cuts.tokens]).transpose(1, 2), _cuts)
    return original(b, c, x, weight, states, *args, **kwargs)


def _write(states: Any, windows: Any, cuts: _Cuts) -> None:
    """`windows` [n, channels, width] into their slots of `states`."""
    states[cuts.slots] = windows.to(states.dtype)
    for checkpoint in cuts.checkpoints:
        checkpoint.written = True
