"""Depthwise causal convolution over packed sequences, and its one-token update.

State layout [slots, channels, width - 1]: the last inputs, oldest first, as in SGLang's pool on a CPU. Every input is
rounded to the state's dtype before it is used, also inside a prefill: a prompt served from a checkpoint and the same
prompt computed in one go then see the same taps.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_hybrid.engine.cpu.speculation.candidates import windows

PAD_SLOT = -1


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    conv_states: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    seq_lens_cpu: list[int] | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT,
) -> Tensor:
    """Convolve packed sequences x [channels, T] with weight [channels, width]; returns [channels, T].

    Sequence i continues from conv_states[cache_indices[i]] if has_initial_state[i] and leaves its last width - 1 inputs
    there. A sequence whose slot is pad_slot_id starts from zeros and stores nothing. seq_lens_cpu is not needed.
    """
    channels, tokens = x.shape
    past_len = weight.shape[-1] - 1
    bounds = [0, tokens] if query_start_loc is None else query_start_loc.tolist()
    slots = list(range(len(bounds) - 1)) if cache_indices is None else cache_indices.tolist()
    resumes = [False] * len(slots) if has_initial_state is None or conv_states is None else has_initial_state.tolist()
    dtype = x.dtype if conv_states is None else conv_states.dtype
    rows = x.mT.to(dtype)
    pieces, live = [], []
    for (lo, hi), slot, resume in zip(pairwise(bounds), slots, resumes, strict=False):
        if hi > lo:
            past = conv_states[slot].mT if resume and slot != pad_slot_id else rows.new_zeros(past_len, channels)
            pieces += [past, rows[lo:hi]]
            live.append((lo, hi, slot))
    if not live:
        return torch.zeros_like(x)
    padded = torch.cat(pieces)
    out = _convolve(padded.float(), weight.float(), bias, activation).to(x.dtype)
    if conv_states is not None:
        _store(conv_states, padded, live, past_len, pad_slot_id)
    outputs, at = [], 0
    for lo, hi, _ in live:
        outputs.append(out[at : at + hi - lo])
        at += hi - lo + past_len
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).mT


def _convolve(padded: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """[rows, channels] float32 -> [rows - width + 1, channels]: one multiply-add per tap, channels contiguous."""
    count = padded.shape[0] - weight.shape[1] + 1
    taps = weight.mT.contiguous()
    out = padded[:count] * taps[0] if bias is None else torch.addcmul(bias.float(), padded[:count], taps[0])
    for j in range(1, taps.shape[0]):
        out.addcmul_(padded[j : j + count], taps[j])
    return _activate(out, activation)


def _activate(x: Tensor, activation: str | bool | None) -> Tensor:
    return F.silu(x, inplace=True) if activation in ("silu", "swish", True) else x


def _store(conv_states: Tensor, padded: Tensor, live: list[tuple[int, int, int]], past_len: int, pad_slot: int) -> None:
    end = 0
    for lo, hi, slot in live:
        end += hi - lo + past_len
        if slot != pad_slot:
            conv_states[slot] = padded[end - past_len : end].mT


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    **links: Tensor | None,
) -> Tensor:
    """One new token per row: x [R, channels], weight [channels, width]; returns [R, channels], shifts the states.

    A row whose slot is pad_slot_id neither reads nor writes a state. With `intermediate_conv_window` x is [R, channels,
    nodes], candidates of each row, and the states stay as they are: see `candidates.windows`.
    """
    slots = list(range(x.shape[0])) if conv_state_indices is None else conv_state_indices.tolist()
    if intermediate_conv_window is not None and intermediate_state_indices is not None:
        out = windows(
            x, conv_state, weight, bias, slots, intermediate_conv_window, intermediate_state_indices, **links
        )  # fmt: skip
        return _activate(out, activation).to(x.dtype)
    if x.dim() != 2 or cache_seqlens is not None:
        raise NotImplementedError(f"the CPU platform decodes one token per row: x {tuple(x.shape)}")
    new = x.to(conv_state.dtype).unsqueeze(-1)
    window = torch.cat([_windows(conv_state, slots, pad_slot_id), new], -1)
    taps = weight.float()
    out = (window.float() * taps).sum(-1)
    if bias is not None:
        out += bias.float()
    _put(conv_state, slots, window[..., 1:], pad_slot_id)
    return _activate(out, activation).to(x.dtype)


def _windows(pool: Tensor, slots: list[int], pad_slot: int) -> Tensor:
    if len(slots) == 1 and slots[0] != pad_slot:
        return pool[slots[0]].unsqueeze(0)
    return pool.index_select(0, torch.tensor(slots).clamp_(min=0))


def _put(pool: Tensor, slots: list[int], windows: Tensor, pad_slot: int) -> None:
    if len(slots) == 1:
        if slots[0] != pad_slot:
            pool[slots[0]] = windows[0]
        return
    rows = [row for row, slot in enumerate(slots) if slot != pad_slot]
    if len(rows) < len(slots):
        slots, windows = [slots[row] for row in rows], windows[rows]
    pool[slots] = windows
