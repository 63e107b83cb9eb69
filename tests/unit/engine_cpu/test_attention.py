"""Attention of new tokens over a cached prefix against the definition, and against SGLang's own."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_hybrid.engine.cpu import attention

HEADS, KV_HEADS, SIZE, SLOTS = 4, 2, 16, 4000


def never(*args, **kwargs):
    raise AssertionError("causal attention is ours")


def reference(query, key, value, prefix, scale):
    """Row i of the new ones looks at the keys up to prefix + i; float64."""
    query, key, value = (t.double() for t in (query, key, value))
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    hidden = torch.arange(key.shape[0]) > prefix + torch.arange(query.shape[0])[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "requests",
    [
        [(0, 70)],
        [(200, 1)],
        [(1, 33), (0, 5), (300, 40)],
        [(600, 2 * attention.ROWS + 9)],
        [(9, 300)],
        [(50, 0), (0, 3)],
    ],
)
def test_new_rows_are_what_the_definition_says(requests, cache_dtype, rng):
    k_cache, v_cache = (torch.randn(SLOTS, KV_HEADS, SIZE, generator=rng).to(cache_dtype) for _ in range(2))
    prefixes, sizes = (torch.tensor(column) for column in zip(*requests, strict=True))
    table = torch.stack([torch.randperm(SLOTS, generator=rng)[:1000] for _ in requests]).int()
    order = torch.arange(len(requests)).flip(0)  # rows of the table in another order than the requests
    query = torch.randn(int(sizes.sum()), HEADS, SIZE, generator=rng)
    output = torch.full_like(query, torch.nan)
    got = attention.extend(
        never, None, query, output, k_cache, v_cache, table, order, prefixes + sizes, prefixes, sizes,
        scaling=0.3, enable_gqa=True, causal=True,
    )  # fmt: skip
    assert got is output
    begin = 0
    for row, prefix, new in zip(order.tolist(), prefixes.tolist(), sizes.tolist(), strict=True):
        slots = table[row, : prefix + new].long()
        want = reference(query[begin : begin + new], k_cache[slots], v_cache[slots], prefix, 0.3)
        torch.testing.assert_close(got[begin : begin + new].double(), want, atol=1e-5, rtol=1e-5)
        begin += new


def test_a_prompt_without_a_prefix_is_one_causal_call(rng, monkeypatch):
    """The very call that SGLang's backend makes, so the same bits."""
    calls = []

    def recorded(*tensors, **settings):
        calls.append((tensors, settings, scaled_dot_product_attention(*tensors, **settings)))
        return calls[-1][2]

    monkeypatch.setattr(attention, "scaled_dot_product_attention", recorded)
    k_cache, v_cache = (torch.randn(SLOTS, KV_HEADS, SIZE, generator=rng) for _ in range(2))
    query = torch.randn(90, HEADS, SIZE, generator=rng)
    table, sizes = torch.arange(90)[None].int(), torch.tensor([90])
    got = attention.extend(
        never, None, query, torch.empty_like(query), k_cache, v_cache, table, torch.tensor([0]), sizes,
        torch.tensor([0]), sizes, enable_gqa=True, causal=True,
    )  # fmt: skip
    ((given, settings, found),) = calls
    for tensor, whole in zip(given, (query, k_cache[:90], v_cache[:90]), strict=True):
        assert torch.equal(tensor, whole.transpose(0, 1)[None])
    assert settings == {"is_causal": True, "scale": None, "enable_gqa": True}
    assert torch.equal(got, found[0].transpose(0, 1))


@pytest.mark.parametrize(
    "more",
    [{"causal": False}, {"is_cross_attn": True}, {"sliding_window_size": 128}, {"encoder_lens": torch.tensor([3])}],
)
def test_anything_else_is_left_to_sglang(more):
    seen = []
    tensors = [torch.zeros(1)] * 9

    def original(backend, *args, **kwargs):
        seen.append((backend, len(args), kwargs))
        return "theirs"

    given = {"causal": True, **more}
    assert attention.extend(original, "backend", *tensors, **given) == "theirs"
    ((backend, count, passed),) = seen
    assert (backend, count) == ("backend", 10)
    for name in set(more) - {"encoder_lens"}:
        assert passed[name] == more[name]
