"""Demo models for speculative decoding: hybrid ones with a multi-token prediction head, and a dense one that drafts.

`mtp` has the layout of Qwen3.5 as it is published, the head in tensors `mtp.*`, without the encoder of images that
`vision-mtp` has. Their blocks add so little to a token that the next one follows mostly, but not always, from the last:
what only knows the last token guesses right about six times in ten, and a wrong state gives other text. Head and
`draft` learn to guess from their text by least squares.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_hybrid.demo.tokenizer import printable_token_ids
from sglang_hybrid.demo.vision import QWEN3_5

if TYPE_CHECKING:
    from torch import Tensor

MTP, VISION_MTP, DRAFT = "mtp", "vision-mtp", "draft"

HEAD = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
"""What configurations say of a head."""

FEED_FORWARD, MIXER = 0.006, 0.018
"""What the last matrices of feed-forwards and mixers are multiplied with: the larger, the fewer guesses are right, and
the more of the text depends on mixers, thus on states."""

DRAFT_BLOCK = 0.05
"""Of the draft model's layer, which is to be computed right and does not help."""

PROMPTS, PROMPT_TOKENS, TEXT_TOKENS = 96, 32, 96
"""Text that guesses are learned from."""


def target(common: dict[str, Any]) -> Any:
    """Qwen3.5, dense and text only; the configuration announces the head as published ones do."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modelling

    # Beside flash-linear-attention and causal-conv1d the text would be written with kernels that need a GPU, where
    # older transformers take them as soon as they are installed.
    if hasattr(modelling, "is_fast_path_available"):
        for name in ("FusedRMSNormGated", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
            setattr(modelling, name, None)
        modelling.causal_conv1d_fn = modelling.causal_conv1d_update = None
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **common,
            **QWEN3_5,
            head_dim=32,
            partial_rotary_factor=0.25,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
            attn_output_gate=True,
            mamba_ssm_dtype="float32",
            **HEAD,
        )
    )


def draft(common: dict[str, Any]) -> Any:
    """Qwen3 of one layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(**common, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    )


def calm(model: Any) -> None:
    """Make the random `target` one whose tokens follow mostly from the last one."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".visual." in name:
                continue
            if name.endswith("down_proj.weight"):
                weight.mul_(FEED_FORWARD)
            elif name.endswith(("o_proj.weight", "out_proj.weight")):
                weight.mul_(MIXER)


def imitate(model: Any, of: Any) -> None:
    """Give the random `draft` the head of the calm target `of`, and as embedding of a token what `of` made of it."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(DRAFT_BLOCK)
        model.lm_head.weight.copy_(of.lm_head.weight)
        model.model.embed_tokens.weight.copy_(of.model.embed_tokens.weight)
        tokens, states = _text(of)
        for token in tokens.unique():
            model.model.embed_tokens.weight[token] = states[tokens == token].mean(0)


def add_head(folder: Path, model: Any) -> None:
    """Put a multi-token prediction head of the target `model` beside its weights in `folder`.

    A head reads the last hidden state, after its norm, and the embedding of the next token; `fc` makes of both the
    hidden state behind that token. The layer after it is a copy of the target's layer of attention.
    """
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    text = model.config.get_text_config()
    layers = "model.language_model.layers." if hasattr(model.model, "language_model") else "model.layers."
    last = f"{layers}{text.num_hidden_layers - 1}."
    head = {name.replace(last, "mtp.layers.0."): weights[name].clone() for name in weights if name.startswith(last)}
    with torch.no_grad():
        tokens, states = _text(model)
        token = model.get_input_embeddings().weight[tokens[:, 1:]]
        head["mtp.fc.weight"] = fitted(torch.cat([unit(token), unit(states[:, :-1])], -1), states[:, 1:])
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        head[f"mtp.{name}.weight"] = torch.zeros(text.hidden_size)  # stored minus one
    save_file({**weights, **head}, file, {"format": "pt"})


def _text(model: Any) -> tuple[Tensor, Tensor]:
    """Tokens that `model` writes behind random prompts, [texts, tokens], and its hidden states behind each."""
    import torch

    spoken = torch.tensor(printable_token_ids())
    drawn = torch.randint(len(spoken), (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    model.float().eval()
    tokens = model.generate(spoken[drawn], max_new_tokens=TEXT_TOKENS, do_sample=False)
    states = model.model(tokens).last_hidden_state
    return tokens[:, PROMPT_TOKENS:], states[:, PROMPT_TOKENS:]


def fitted(read: Tensor, wanted: Tensor) -> Tensor:
    """The matrix [m, n] that makes of `read` [texts, tokens, n] what is nearest to `wanted` [texts, tokens, m]."""
    import torch

    rows = read.flatten(0, 1)
    square = rows.T @ rows + 0.01 * len(rows) * torch.eye(rows.shape[1])
    return torch.linalg.solve(square, rows.T @ wanted.flatten(0, 1)).T.contiguous()


def unit(x: Tensor) -> Tensor:
    """`x` with a mean square of one in its last dimension."""
    import torch

    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
