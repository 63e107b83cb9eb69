"""Kimi-Linear at toy size: Kimi delta attention, latent attention without positions, experts (arXiv 2510.26692).

transformers has no such model, so this is both where the random weights come from and the judge of what a server says:
token by token, in plain PyTorch, with the names of published checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ARCHITECTURE = "KimiLinearForCausalLM"
HEADS, HEAD, TAPS = 4, 32, 4
ROPE, NOPE, LATENT, VALUE = 16, 32, 48, 32
EPS = 1e-5


def config(common: dict[str, Any], layers: int = 4) -> dict[str, Any]:
    """config.json of `layers` layers, every fourth of them attention; layers are numbered from one there."""
    hidden = common["hidden_size"]
    attended = list(range(4, layers + 1, 4))
    return {
        **common,
        "architectures": [ARCHITECTURE],
        "model_type": "kimi_linear",
        "dtype": "float32",
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": EPS,
        "kv_lora_rank": LATENT,
        "q_lora_rank": None,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": attended,
            "kda_layers": [layer for layer in range(1, layers + 1) if layer not in attended],
            "head_dim": HEAD,
            "num_heads": HEADS,
            "short_conv_kernel_size": TAPS,
        },
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": hidden // 2,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.0,
        "first_k_dense_replace": 1,
        "num_expert_group": 1,
        "topk_group": 1,
    }


class RMSNorm(nn.Module):
    """x / rms(x), times a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weight


class Convolution(nn.Module):
    """Depthwise causal convolution and SiLU: x [T, channels]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, TAPS))

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.mT, (TAPS - 1, 0))
        return F.silu(F.conv1d(padded[None], self.weight, groups=x.shape[1])[0].mT)


class DeltaAttention(nn.Module):
    """Kimi delta attention (section 3): a gated delta rule that forgets by channel."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        width = HEADS * HEAD
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Convolution(width) for _ in range(3))
        self.A_log = nn.Parameter(torch.empty(1, 1, HEADS, 1))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.f_a_proj, self.g_a_proj = (nn.Linear(hidden, HEAD, bias=False) for _ in range(2))
        self.f_b_proj, self.g_b_proj = (nn.Linear(HEAD, width, bias=False) for _ in range(2))
        self.b_proj = nn.Linear(hidden, HEADS, bias=False)
        self.o_norm = RMSNorm(HEAD)
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            convolve(project(x)).unflatten(-1, (HEADS, HEAD))
            for project, convolve in (
                (self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d),
            )
        )  # fmt: skip
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        raw = (self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).unflatten(-1, (HEADS, HEAD))
        kept = (-self.A_log.view(HEADS, 1).exp() * F.softplus(raw)).exp()
        beta = self.b_proj(x).sigmoid()[..., None]
        state, outputs = x.new_zeros(HEADS, HEAD, HEAD), []  # [heads, V, K]
        for t in range(len(x)):
            state = state * kept[t][:, None]
            written = beta[t] * (v[t] - (state @ k[t][..., None])[..., 0])
            state = state + written[..., None] * k[t][:, None]
            outputs.append((state @ q[t][..., None])[..., 0])
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, (HEADS, HEAD)).sigmoid()
        out = torch.stack(outputs) * HEAD**-0.5
        return self.o_proj((self.o_norm(out) * gate).flatten(1))


class LatentAttention(nn.Module):
    """Multi-head latent attention without positions."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, LATENT + ROPE, bias=False)
        self.kv_a_layernorm = RMSNorm(LATENT)
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.o_proj = nn.Linear(HEADS * VALUE, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (HEADS, NOPE + ROPE)).transpose(0, 1)
        latent, shared = self.kv_a_proj_with_mqa(x).split([LATENT, ROPE], -1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (HEADS, NOPE + VALUE)).transpose(0, 1)
        k = torch.cat([both[..., :NOPE], shared.expand(HEADS, -1, -1)], -1)
        out = F.scaled_dot_product_attention(q, k, both[..., NOPE:], is_causal=True)
        return self.o_proj(out.transpose(0, 1).flatten(1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Expert(nn.Module):
    """SwiGLU by the names of the checkpoint."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Router(nn.Module):
    """Scores of experts; the bias has a say in which are taken and none in their weight."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.e_score_correction_bias = nn.Parameter(torch.linspace(-0.1, 0.1, experts))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.mT).sigmoid()


class Experts(nn.Module):
    """The chosen experts' weighted sum, and the expert that all tokens share."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        hidden, width = given["hidden_size"], given["moe_intermediate_size"]
        self.taken, self.scale = given["num_experts_per_token"], given["routed_scaling_factor"]
        self.gate = Router(hidden, given["num_experts"])
        self.experts = nn.ModuleList(Expert(hidden, width) for _ in range(given["num_experts"]))
        self.shared_experts = FeedForward(hidden, width * given["num_shared_experts"])

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.taken, -1).indices
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        weights = weights / weights.sum(-1, keepdim=True) * self.scale
        every = torch.stack([expert(x) for expert in self.experts], -1)
        return (every * weights[:, None]).sum(-1) + self.shared_experts(x)


class Layer(nn.Module):
    """One mixer and one feed-forward block around the residual stream."""

    def __init__(self, given: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden = given["hidden_size"]
        is_delta = index + 1 in given["linear_attn_config"]["kda_layers"]
        self.self_attn = DeltaAttention(hidden) if is_delta else LatentAttention(hidden)
        if index < given["first_k_dense_replace"]:
            self.mlp = FeedForward(hidden, given["intermediate_size"])
        else:
            self.block_sparse_moe = Experts(given)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden), RMSNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + (self.mlp if hasattr(self, "mlp") else self.block_sparse_moe)(self.post_attention_layernorm(x))


class KimiLinear(nn.Module):
    """The whole model: token ids [T] to logits [T, vocabulary]."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given
        hidden, tokens = given["hidden_size"], given["vocab_size"]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(tokens, hidden)
        self.model.layers = nn.ModuleList(Layer(given, index) for index in range(given["num_hidden_layers"]))
        self.model.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))

    def save_pretrained(self, folder: Path) -> None:
        """config.json and the weights, as a published checkpoint has them."""
        from safetensors.torch import save_file

        Path(folder, "config.json").write_text(json.dumps(self.given, indent=2))
        save_file(self.state_dict(), Path(folder, "model.safetensors"), {"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder: Path) -> KimiLinear:
        from safetensors.torch import load_file

        model = cls(json.loads(Path(folder, "config.json").read_text()))
        model.load_state_dict(load_file(Path(folder, "model.safetensors")))
        return model.eval()
