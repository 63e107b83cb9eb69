"""A hybrid target and an EAGLE-3 draft for it, made without training."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_hybrid.demo import speculation
from tests.engine.prompts import words
from tests.engine.support import Reference

READ = (0, 1, 2)
"""The layers behind which the draft reads hidden states."""

HEADS, TEXTS, PROMPT, SAID = 4, 96, 32, 96
SHARP = 3.0
"""How much attention prefers the same token."""


def calm_target(folder: Path, wild: Path) -> Path:
    """The model `wild` (Qwen3-Next) with weights by which a token follows mostly, but not always, from the last."""
    model = Reference(wild).model
    speculation.calm(model)
    model.save_pretrained(folder)
    for file in wild.glob("*token*"):
        shutil.copy(file, folder / file.name)
    return folder


def draft(folder: Path, target: Path, vocabulary: int = 0) -> Path:
    """A draft of one layer, which guesses from hidden states of the target and the embedding of the next token.

    Attention finds the positions of the same token, and so passes its embedding on; feed-forward adds nothing. What is
    made of both is learned by least squares. With `vocabulary` the draft knows that many tokens only, the most said.
    """
    model = Reference(target).model
    tokens, hidden, states = _text(model)
    size, embedding = model.config.hidden_size, model.model.embed_tokens.weight.detach()
    following = speculation.unit(embedding[tokens[:, 1:]])
    learned = speculation.fitted(torch.cat([hidden[:, :-1], following], -1), states[:, 1:])
    first = torch.cat([torch.eye(size), torch.zeros(size, size)], -1)  # the half that is the embedding
    ones, layer = torch.ones(size), "model.layers.0."
    weights = {
        "model.fc.weight": learned[:, : len(READ) * size],
        f"{layer}self_attn.q_proj.weight": SHARP * first,
        f"{layer}self_attn.k_proj.weight": SHARP * first,
        f"{layer}self_attn.v_proj.weight": first,
        f"{layer}self_attn.o_proj.weight": learned[:, len(READ) * size :],
        f"{layer}mlp.gate_proj.weight": torch.ones(size, size),
        f"{layer}mlp.up_proj.weight": torch.ones(size, size),
        f"{layer}mlp.down_proj.weight": torch.zeros(size, size),
        f"{layer}hidden_norm.weight": ones,
        f"{layer}input_layernorm.weight": ones,
        f"{layer}post_attention_layernorm.weight": ones,
        "model.norm.weight": ones,
        "lm_head.weight": model.lm_head.weight.detach(),
    }
    if vocabulary:
        most = torch.bincount(tokens.flatten()).argsort(descending=True)[:vocabulary].sort().values
        weights["lm_head.weight"] = weights["lm_head.weight"][most]
        weights["d2t"] = most - torch.arange(vocabulary)  # SGLang adds the place
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": size,
        "intermediate_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": size // HEADS,
        "vocab_size": model.config.vocab_size,
        "draft_vocab_size": vocabulary or model.config.vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": model.config.max_position_embeddings,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(READ)},
    }
    folder.mkdir()
    save_file({name: weight.clone().contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def _text(model: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens that the model says, the hidden states that a draft reads, and the last ones: [texts, tokens, ...]."""
    rng = random.Random(1)
    asked = torch.tensor([words(rng, PROMPT) for _ in range(TEXTS)])
    tokens = model.generate(asked, max_new_tokens=SAID, do_sample=False, eos_token_id=None, pad_token_id=0)
    layers = model.model(tokens, output_hidden_states=True)
    hidden = torch.cat([layers.hidden_states[i + 1] for i in READ], -1)
    return tokens[:, PROMPT:], hidden[:, PROMPT:], layers.last_hidden_state[:, PROMPT:]
