"""The multi-token prediction head of `reader-gdn`, in the layout of Qwen3.5, and how it drafts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_hybrid.demo.reader.network.layers import Attention, Norm, rotate
from sglang_hybrid.demo.reader.network.models import HIDDEN, DeltaBlock

PREFIX = "mtp."
"""Of its tensors in a model's folder."""


class Head(nn.Module):
    """Reads a hidden state and the embedding of the token behind it; makes the hidden state behind that token."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(HIDDEN, offset=1), Norm(HIDDEN, offset=1)
        self.layers = nn.ModuleList([DeltaBlock(attention=True)])
        self.norm = Norm(HIDDEN, offset=1)

    def forward(self, states: Tensor, embedded: list[Tensor]) -> list[Tensor]:
        """Hidden states of every step of a draft, each [batch, tokens, hidden].

        `states`: the trunk's after its last norm, [batch, tokens, hidden]; `embedded[i]`: the token i + 1 places behind
        each, of the same shape. Step i reads what step i - 1 made, and in attention the keys and values of the trunk's
        states up to its own and of the steps between.
        """
        block: Any = self.layers[0]
        made, keys, values = [], [], []
        for step, token in enumerate(embedded):
            read = torch.cat([self.pre_fc_norm_embedding(token), self.pre_fc_norm_hidden(states)], -1)
            x = self.fc(read)
            q, k, v, gate = _projected(block.self_attn, block.input_layernorm(x), first=step)
            keys.append(k)
            values.append(v)
            y = _attend(q, keys, values) * gate.sigmoid()
            x = x + block.self_attn.o_proj(y)
            x = x + block.mlp(block.post_attention_layernorm(x))
            states = self.norm(x)
            made.append(states)
        return made


def _projected(layer: Attention, x: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values [batch, heads, tokens, head] at positions from `first`, and the output gate."""
    batch, tokens, _ = x.shape
    q, gate = layer.q_proj(x).view(batch, tokens, layer.heads, -1).chunk(2, dim=-1)
    k = layer.k_proj(x).view(batch, tokens, layer.kv_heads, layer.head)
    v = layer.v_proj(x).view(batch, tokens, layer.kv_heads, layer.head).transpose(1, 2)
    angles = torch.arange(first, first + tokens, device=x.device, dtype=torch.float32)[:, None] * layer.frequencies
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    q, k = (rotate(norm(y).transpose(1, 2), cosine, sine) for norm, y in ((layer.q_norm, q), (layer.k_norm, k)))
    share = layer.heads // layer.kv_heads
    return q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), gate.reshape(batch, tokens, -1)


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention to the first keys up to the same place, and to the later ones of the same place alone."""
    if len(keys) == 1:
        y = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
        return y.transpose(1, 2).flatten(2)
    scale = q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    far = (q @ keys[0].transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
    near = torch.stack([(q * k).sum(-1) * scale for k in keys[1:]], -1)
    weights = torch.cat([far, near], -1).softmax(-1)
    y = weights[..., : -len(keys) + 1] @ values[0]
    for i, v in enumerate(values[1:], 1 - len(keys)):
        y = y + weights[..., i, None] * v
    return y.transpose(1, 2).flatten(2)


def initialise(head: Head, reader: Any) -> None:
    """Begin with the trunk's layer of attention, and with the state behind a token as the state before it."""
    head.layers[0].load_state_dict(reader.model.layers[-1].state_dict())
    head.norm.load_state_dict(reader.model.norm.state_dict())
    with torch.no_grad():
        eye = torch.eye(HIDDEN)
        head.fc.weight.copy_(torch.cat([eye, eye], 1))
