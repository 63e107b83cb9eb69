"""The readers' networks: the chunked forms against the recurrences, and logits against those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang_hybrid.demo.reader import tokens, weights
from sglang_hybrid.demo.reader.network import models
from sglang_hybrid.demo.reader.network.delta import gated_delta_rule, unit
from sglang_hybrid.demo.reader.network.ssd import state_space


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 15, 16, 50])
def test_the_gated_delta_rule_is_its_recurrence(length: int) -> None:
    q, k, v = (random_tensor(2, 3, length, 8, seed=seed) for seed in (1, 2, 3))
    k = unit(k)
    g, beta = -random_tensor(2, 3, length, seed=4).exp(), random_tensor(2, 3, length, seed=5).sigmoid()
    state = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    wanted = []
    for t in range(length):
        state = state * g[:, :, t, None, None].exp()
        error = v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], beta[:, :, t, None] * error)
        wanted.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    made, last = gated_delta_rule(q, k, v, g, beta, chunk=16)
    torch.testing.assert_close(made, torch.stack(wanted, 2))
    torch.testing.assert_close(last, state)


@pytest.mark.parametrize("cut", [1, 16, 33])
def test_a_sequence_goes_on_from_its_state(cut: int) -> None:
    q, k, v = (random_tensor(2, 3, 50, 8, seed=seed) for seed in (1, 2, 3))
    g, beta = -random_tensor(2, 3, 50, seed=4).exp(), random_tensor(2, 3, 50, seed=5).sigmoid()
    rule, space = (q, unit(k), v, g, beta), (v, q[:, :1], k[:, :1], g)
    for layer, whole in ((gated_delta_rule, rule), (state_space, space)):
        first, state = layer(*(x[:, :, :cut] for x in whole))
        second, last = layer(*(x[:, :, cut:] for x in whole), state=state)
        torch.testing.assert_close((torch.cat([first, second], 2), last), layer(*whole))


@pytest.mark.parametrize("length", [1, 15, 16, 50])
def test_the_state_space_is_its_recurrence(length: int) -> None:
    x, b, c = (
        random_tensor(2, 3, length, 4, seed=1),
        random_tensor(2, 1, length, 8, seed=2),
        random_tensor(2, 1, length, 8),
    )
    g = -random_tensor(2, 3, length, seed=4).exp()
    state = torch.zeros(2, 3, 8, 4, dtype=torch.float64)
    wanted = []
    for t in range(length):
        state = state * g[:, :, t, None, None].exp() + b[:, :, t, :, None] * x[:, :, t, None, :]
        wanted.append((c[:, :, t, None, :] @ state)[:, :, 0])
    made, last = state_space(x, b, c, g, chunk=16)
    torch.testing.assert_close(made, torch.stack(wanted, 2))
    torch.testing.assert_close(last, state)


@pytest.mark.parametrize("model", models.READERS)
def test_transformers_gives_the_same_logits(model: str, tmp_path: Path) -> None:
    from sglang_hybrid.engine import cpu

    cpu.install()
    from transformers import AutoModelForCausalLM

    network = models.READERS[model](tokens.VOCABULARY)
    generator = torch.Generator().manual_seed(3)
    models.initialise(network, generator)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    weights.write(network.state_dict(), tmp_path / "trained.safetensors")
    weights.build(tmp_path, model, tmp_path / "trained.safetensors")
    ours = weights.network(model, tmp_path / "trained.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    read = torch.randint(len(tokens.SPECIAL_TOKENS), tokens.VOCABULARY, (1, 70), generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(ours(read), theirs(read).logits, atol=1e-3, rtol=1e-4)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == tokens.special_id(tokens.END)


def test_mamba2_begins_by_looking_behind_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attention in the second half of a text that is said twice, most goes to what followed in the first half."""
    network, n = models.READERS["reader-mamba2"](tokens.VOCABULARY), 128
    models.initialise(network, torch.Generator().manual_seed(1))
    said = torch.randperm(tokens.VOCABULARY, generator=torch.Generator().manual_seed(2))[:n]
    plain, shares = torch.nn.functional.scaled_dot_product_attention, list[Tensor]()

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: bool) -> Tensor:
        scores = q @ k.repeat_interleave(models.HEADS // models.KV_HEADS, 1).transpose(-1, -2) / models.HEAD**0.5
        hidden = torch.ones(2 * n, 2 * n, dtype=torch.bool).triu(1)
        rows = torch.arange(n, 2 * n - 1)
        shares.append(scores.masked_fill(hidden, -torch.inf).softmax(-1)[0, :, rows, rows - n + 1].mean(1))
        return plain(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    with torch.no_grad():
        network(torch.cat([said, said])[None])
    first, *later = shares
    assert first.max() < 0.1
    assert all(share[: models.HEADS // models.KV_HEADS].min() > 0.5 for share in later), shares
