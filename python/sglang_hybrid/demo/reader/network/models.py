"""`reader-gdn` in the layout of Qwen3.5 (dense, text only) and `reader-mamba2` in that of Falcon-H1.

A state dict of either is what the transformers class of its configuration loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_hybrid.demo.reader.network.delta import DeltaLayer
from sglang_hybrid.demo.reader.network.layers import Attention, Mlp, Norm
from sglang_hybrid.demo.reader.network.ssd import SsdLayer

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, LAYERS = 192, 224, 6, 2, 32, 4
ROTARY, THETA = 8, 100.0
"""A quarter of each head is rotated, slowest once in 200 tokens: no angle appears late in a long text only."""

MAMBA2_THETA = 1e11
"""Falcon-H1 rotates whole heads; with its own base most of a head hardly turns."""


class DeltaBlock(nn.Module):
    """One layer of Qwen3.5: every fourth is attention."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        if attention:
            self.self_attn = Attention(HIDDEN, HEADS, KV_HEADS, HEAD, ROTARY, THETA, gated=True)
        else:
            self.linear_attn = DeltaLayer(HIDDEN, HEADS, HEAD)
        self.attention = attention
        self.mlp = Mlp(HIDDEN, INNER)
        self.input_layernorm, self.post_attention_layernorm = Norm(HIDDEN, offset=1), Norm(HIDDEN, offset=1)

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.self_attn if self.attention else self.linear_attn
        x = x + mixer(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class ParallelBlock(nn.Module):
    """One layer of Falcon-H1: Mamba-2 and attention side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.feed_forward = Mlp(HIDDEN, INNER)
        self.mamba = SsdLayer(HIDDEN, HIDDEN, HEADS, state=32)
        self.self_attn = Attention(HIDDEN, HEADS, KV_HEADS, HEAD, HEAD, MAMBA2_THETA, gated=False)
        self.input_layernorm, self.pre_ff_layernorm = Norm(HIDDEN), Norm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        x = x + self.mamba(y) + self.self_attn(y)
        return x + self.feed_forward(self.pre_ff_layernorm(x))


class Body(nn.Module):
    """Embedding, blocks, last norm."""

    def __init__(self, vocabulary: int, blocks: list[nn.Module], last_norm: str, offset: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, HIDDEN)
        self.layers = nn.ModuleList(blocks)
        self.last_norm = last_norm
        self.add_module(last_norm, Norm(HIDDEN, offset))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x)
        return self.get_submodule(self.last_norm)(x)


class Reader(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.model = body

    def forward(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, vocabulary] of `tokens`; [n, vocabulary] of the n positions where `keep` is true."""
        x = self.model(tokens)
        return F.linear(x if keep is None else x[keep], self.model.embed_tokens.weight)


def gdn(vocabulary: int) -> Reader:
    return Reader(Body(vocabulary, [DeltaBlock(layer % 4 == 3) for layer in range(LAYERS)], "norm", offset=1))


def mamba2(vocabulary: int) -> Reader:
    return Reader(Body(vocabulary, [ParallelBlock() for _ in range(LAYERS)], "final_layernorm", offset=0))


def gdn_configuration(vocabulary: int, end: int, pad: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **_common(vocabulary, end, pad),
        "num_hidden_layers": LAYERS,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "linear_key_head_dim": HEAD,
        "linear_value_head_dim": HEAD,
        "linear_num_key_heads": HEADS,
        "linear_num_value_heads": HEADS,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": ROTARY / HEAD,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": ROTARY / HEAD},
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
    }


def mamba2_configuration(vocabulary: int, end: int, pad: int) -> dict[str, Any]:
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        **_common(vocabulary, end, pad),
        "num_hidden_layers": LAYERS,
        "rope_theta": MAMBA2_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": MAMBA2_THETA},
        "mamba_d_ssm": HIDDEN,
        "mamba_n_heads": HEADS,
        "mamba_d_head": HIDDEN // HEADS,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 1,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": True,
        "mamba_rms_norm": False,
        "bos_token_id": None,
        "tie_word_embeddings": False,  # tied, SGLang makes the embedding float32 with its head, and GPUs refuse the mix
    }


def _common(vocabulary: int, end: int, pad: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "float32",
    }


READERS: dict[str, Callable[[int], Reader]] = {"reader-gdn": gdn, "reader-mamba2": mamba2}
CONFIGURATIONS: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "reader-gdn": gdn_configuration,
    "reader-mamba2": mamba2_configuration,
}


def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Weights to start a training from: memories of 1 to 1,000 tokens, and layers that already find what they look for.

    Queries and keys begin as the same projection, so that a token finds its own like; in half of the heads it finds
    what came behind its like (after Trockman et al., 2024, "Mimetic Initialization Helps State Space Models Learn to
    Recall"). From random ones, copying a name appears only after a million tokens.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("A_log", ".D", "norm.weight", "layernorm.weight", "conv1d.bias")):
                continue
            if name.endswith("dt_bias"):  # softplus of it is the step: 0.001 to 0.3, evenly in its logarithm
                step = torch.linspace(math.log(0.001), math.log(0.3), weight.numel()).exp()
                weight.copy_(step + torch.log(-torch.expm1(-step)))
            elif name.endswith("conv1d.weight"):
                weight.normal_(0, 0.1, generator=generator)
                weight[:, 0, -1] += 1
            elif name.endswith("embed_tokens.weight"):
                weight.normal_(0, 0.03, generator=generator)
            elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                weight.zero_()  # every layer begins by adding nothing
            elif name.endswith("in_proj_a.weight"):
                weight.zero_()
            else:
                weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
        for layer, module in enumerate(m for m in model.modules() if isinstance(m, (DeltaLayer, SsdLayer, Attention))):
            module.look_for_likes(layer)
        if isinstance(model.get_submodule("model.layers.0"), ParallelBlock):
            _look_behind_likes(model)


def _look_behind_likes(model: Any) -> None:
    """Begin with attention that finds what came behind a token's like.

    Without a delta rule the state of Mamba-2 does not find it. So tokens begin in one half of the dimensions, the first
    mixer writes the token before into the other half, and half of the keys of later attention read it there. One
    dimension is the same for all tokens; it holds that mixer's gate open.
    """
    embedding, first = model.model.embed_tokens.weight, model.model.layers[0].mamba
    half = HIDDEN // 2
    embedding[:, 0] = 0.42
    embedding[:, 1:half] *= 2**0.5
    embedding[:, half:] = 0
    first.in_proj.weight[: 2 * HIDDEN] = 0
    first.in_proj.weight[:HIDDEN, 0] = 0.2  # the gate, far enough above 0 for every token
    first.in_proj.weight[HIDDEN : 2 * HIDDEN] += torch.eye(HIDDEN)
    first.in_proj.weight[HIDDEN, 0] = 0
    first.in_proj.weight[2 * HIDDEN : -HEADS] *= 0.1
    first.conv1d.weight[:HIDDEN] = 0
    first.conv1d.weight[:HIDDEN, 0, -2] = 1
    first.conv1d.bias[:HIDDEN] = 1.28  # where SiLU has slope 1
    first.out_proj.weight[half:, :half] = 0.025 * torch.eye(half)  # as large as the token itself
    for layer in model.model.layers[1:]:
        q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
        for weight in (q, k):
            weight[:, 0] = 0
            weight[:, half:] = 0
            weight *= 3  # most of the attention goes to the one match
        k[:HEAD] = k[:HEAD].roll(half, 1)
