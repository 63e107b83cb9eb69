"""The models for speculative decoding: a target with a multi-token prediction head, and a draft model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_hybrid.core.spec import from_config
from sglang_hybrid.demo import model, speculation

PUBLISHED_HEAD = {
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.layers.0.input_layernorm.weight",
    "mtp.layers.0.post_attention_layernorm.weight",
    *(f"mtp.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    *(f"mtp.layers.0.self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
}
"""Tensors of the head of a dense Qwen3.5; embedding and output are the target's."""

DRAFTED = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: model.build(root / name, name) for name in (speculation.MTP, speculation.DRAFT)}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    return {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, folder in folders.items()
    }


@pytest.fixture(scope="module")
def texts(folders: dict[str, Path], loaded: dict[str, Any]) -> tuple[Tensor, int]:
    """Greedy answers to prompts of equal length, [texts, tokens], and that length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders[speculation.MTP])
    asked = [f"What is number {n} of the first hundred good reasons?" for n in range(10, 34)]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in asked
    ]
    read = tokenizer(prompts, return_tensors="pt")["input_ids"]
    return loaded[speculation.MTP].generate(read, max_new_tokens=64, do_sample=False), read.shape[1]


def test_the_folder_is_laid_out_as_published_models_are(folders: dict[str, Path]) -> None:
    config = json.loads((folders[speculation.MTP] / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert (config["mtp_num_hidden_layers"], config["mtp_use_dedicated_embeddings"]) == (1, False)
    weights = load_file(folders[speculation.MTP] / "model.safetensors")
    assert {name for name in weights if name.startswith("mtp.")} == PUBLISHED_HEAD
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    files = [(folder / "tokenizer.json").read_bytes() for folder in folders.values()]
    assert files[0] == files[1]


@pytest.mark.slow
def test_a_model_that_sees_has_the_same_head(tmp_path: Path) -> None:
    folder = model.build(tmp_path / "model", speculation.VISION_MTP)
    weights = load_file(folder / "model.safetensors")
    assert {name for name in weights if name.startswith("mtp.")} == PUBLISHED_HEAD
    assert any(".visual." in name for name in weights)
    config = json.loads((folder / "config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    assert from_config(folder).head_kv_bytes_per_token > 0
    assert (folder / "processor_config.json").is_file()


def test_the_head_has_kv_of_its_own(folders: dict[str, Path]) -> None:
    spec = from_config(folders[speculation.MTP], kv_dtype="float32")
    assert spec.kv_bytes_per_token == spec.head_kv_bytes_per_token == 2 * 2 * 32 * 4
    plain = json.loads((folders[speculation.MTP] / "config.json").read_text()) | {"mtp_num_hidden_layers": 0}
    without = from_config(plain, kv_dtype="float32", name=spec.name)
    assert without.head_kv_bytes_per_token == 0
    assert (without.kv_bytes_per_token, without.flops_per_token) == (spec.kv_bytes_per_token, spec.flops_per_token)


def test_the_head_guesses_often_and_not_always(
    folders: dict[str, Path], loaded: dict[str, Any], texts: tuple[Tensor, int]
) -> None:
    target, (tokens, begin) = loaded[speculation.MTP], texts
    weights = load_file(folders[speculation.MTP] / "model.safetensors")
    shares = accepted(target, tokens, begin, lambda states, read: head(target, weights, states, read))
    assert 0.5 < shares[0] < 0.8, shares
    assert 0.1 < shares[-1] < 0.6, shares


def test_the_draft_model_guesses_often_and_not_always(loaded: dict[str, Any], texts: tuple[Tensor, int]) -> None:
    draft = loaded[speculation.DRAFT]
    shares = accepted(loaded[speculation.MTP], *texts, lambda states, read: draft.model(read).last_hidden_state)
    assert 0.5 < shares[0] < 0.8, shares
    assert 0.1 < shares[-1] < 0.6, shares


def test_a_wrong_state_gives_other_tokens(loaded: dict[str, Any], texts: tuple[Tensor, int]) -> None:
    target, (tokens, begin) = loaded[speculation.MTP], texts
    with torch.no_grad():
        cache = target(tokens[:, :begin], use_cache=True).past_key_values
        for layer in cache.layers[:3]:
            layer.recurrent_states.zero_()
        other = target(tokens[:, begin:], past_key_values=cache).logits.argmax(-1)
    differs = (other[:, :-1] != tokens[:, begin + 1 :]).float()
    assert differs[:, :16].mean() > 0.05
    assert differs.mean() < 0.9, "it is the same model all the same"


def head(target: Any, weights: dict[str, Tensor], states: Tensor, read: Tensor) -> Tensor:
    """Hidden states of the head in `weights` for hidden states [texts, n, hidden] and the n tokens behind each."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

    layer, begin = Qwen3_5DecoderLayer(target.config, 3).eval(), "mtp.layers.0."
    layer.load_state_dict({name.removeprefix(begin): w for name, w in weights.items() if name.startswith(begin)})
    both = torch.cat([unit(target.model.embed_tokens(read)), unit(states)], -1)
    x = both @ weights["mtp.fc.weight"].T
    places = torch.arange(x.shape[1])[None]
    mask = torch.full((1, 1, x.shape[1], x.shape[1]), -torch.inf).triu(1)
    return unit(layer(x, position_embeddings=target.model.rotary_emb(x, places), attention_mask=mask))


def unit(x: Tensor) -> Tensor:
    """The norm of a layer whose weight is 1."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@torch.no_grad()
def accepted(target: Any, tokens: Tensor, begin: int, guess: Any) -> list[float]:
    """Shares of places behind `begin` where the first, the first two, ... of DRAFTED guesses are what follows."""
    states = target.model(tokens).last_hidden_state
    hits = []
    for place in range(begin, tokens.shape[1] - DRAFTED, 5):
        known, read, right = states[:, :place], tokens[:, 1 : place + 1], torch.ones(len(tokens), dtype=torch.bool)
        row = []
        for step in range(1, DRAFTED + 1):
            made = guess(known, read)[:, -1:]
            guessed = target.lm_head(made).argmax(-1)
            right = right & (guessed[:, 0] == tokens[:, place + step])
            row.append(right.float().mean())
            known, read = torch.cat([known, made], 1), torch.cat([read, guessed], 1)
        hits.append(torch.stack(row))
    return torch.stack(hits).mean(0).tolist()
