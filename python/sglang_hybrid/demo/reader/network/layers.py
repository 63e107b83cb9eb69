"""Layers that both readers have, with the parameter names and the arithmetic of the transformers classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-6

Recurrence = Callable[..., tuple[Tensor, Tensor]]
"""`gated_delta_rule` or `state_space`: inputs, and perhaps a state to begin with, to outputs and the last state."""


class Norm(nn.Module):
    """RMS norm over the last dimension; `offset` 1 where the architecture stores the weight minus one."""

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(
            x.to(self.weight.dtype), x.shape[-1:], self.weight + self.offset if self.offset else self.weight, EPSILON
        )


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Causal attention whose first `rotary` dimensions of a head are rotated; norms and an output gate if `gated`."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head: int, rotary: int, theta: float, gated: bool):
        super().__init__()
        self.heads, self.kv_heads, self.head, self.gated = heads, kv_heads, head, gated
        self.q_proj = nn.Linear(hidden, heads * head * (2 if gated else 1), bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head, bias=False)
        self.o_proj = nn.Linear(heads * head, hidden, bias=False)
        if gated:
            self.q_norm, self.k_norm = Norm(head, offset=1), Norm(head, offset=1)
        frequencies = theta ** (-torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def look_for_likes(self, layer: int) -> None:
        """Begin with the keys of a group as the queries of all its heads."""
        q = self.q_proj.weight.view(self.kv_heads, self.heads // self.kv_heads, -1, self.q_proj.weight.shape[1])
        q[:, :, : self.head] = self.k_proj.weight.view(self.kv_heads, 1, self.head, -1)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [batch, tokens, hidden], from position 0."""
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.heads, -1)
        k = self.k_proj(x).view(batch, tokens, self.kv_heads, self.head)
        v = self.v_proj(x).view(batch, tokens, self.kv_heads, self.head).transpose(1, 2)
        gate = None
        if self.gated:
            q, gate = q.chunk(2, dim=-1)
            q, k = self.q_norm(q), self.k_norm(k)
        angles = torch.arange(tokens, device=x.device, dtype=torch.float32)[:, None] * self.frequencies
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = rotate(q.transpose(1, 2), cosine, sine), rotate(k.transpose(1, 2), cosine, sine)
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
        if gate is not None:
            y = y * gate.sigmoid()
        return self.o_proj(y.reshape(batch, tokens, -1))


def in_float32(recurrence: Recurrence, *inputs: Tensor) -> Tensor:
    """Outputs of `recurrence` in float32, whatever the matrices around it are multiplied in."""
    with torch.autocast(inputs[0].device.type, enabled=False):
        return recurrence(*(each.float() for each in inputs))[0]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the first 2n of the last dimension of `x`, in halves; `cosine`, `sine`: [tokens, n]."""
    half = cosine.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time and SiLU; stored as a `Conv1d` of the same shape is."""

    def __init__(self, channels: int, width: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [batch, tokens, channels]."""
        padded = F.pad(x.transpose(1, 2), (self.weight.shape[-1] - 1, 0))
        return F.silu(F.conv1d(padded, self.weight, self.bias, groups=x.shape[-1])).transpose(1, 2)
