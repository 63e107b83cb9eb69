"""The causal convolution, packed and one token at a time, against float64."""

from itertools import pairwise

import pytest
import torch

from sglang_hybrid.engine.cpu.causal_conv import causal_conv1d_fn, causal_conv1d_update

CHANNELS, WIDTH = 32, 4


def setup(rng, tokens, slots=5, dtype=torch.float32, state_dtype=torch.float32):
    x = torch.randn(tokens, CHANNELS, generator=rng).to(dtype).mT
    weight = torch.randn(CHANNELS, WIDTH, generator=rng).to(dtype)
    bias = torch.randn(CHANNELS, generator=rng).to(dtype)
    return x, weight, bias, torch.randn(slots, CHANNELS, WIDTH - 1, generator=rng).to(state_dtype)


def prefill(x, weight, bias, states, lengths, slots, resumes, **options):
    return causal_conv1d_fn(
        x,
        weight,
        bias,
        conv_states=states,
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0),
        seq_lens_cpu=lengths,
        cache_indices=torch.tensor(slots),
        has_initial_state=torch.tensor(resumes),
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"activation": None}])
@pytest.mark.parametrize("use_bias", [True, False])
def test_packed_sequences_with_and_without_a_past(use_bias, options, naive, rng):
    lengths, slots, resumes = [5, 1, 0, 2, 9, 4], [3, 0, 1, 4, 6, -1], [True, False, True, True, False, True]
    x, weight, bias, states = setup(rng, sum(lengths), slots=8)
    bias = bias if use_bias else None
    before = states.clone()
    out = prefill(x, weight, bias, states, lengths, slots, resumes, **options)
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for (lo, hi), slot, resume in zip(pairwise(bounds), slots, resumes, strict=True):
        if hi == lo:
            continue
        past = before[slot] if resume and slot >= 0 else torch.zeros_like(before[0])
        want, new_past = naive.causal_conv(x[:, lo:hi], weight, bias, past, silu=not options)
        torch.testing.assert_close(out[:, lo:hi].double(), want, atol=1e-5, rtol=1e-5)
        if slot >= 0:
            assert torch.equal(states[slot], new_past.float())
    assert torch.equal(states[[1, 2, 5, 7]], before[[1, 2, 5, 7]])


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 11])
def test_a_prefill_split_anywhere_is_bit_exact(cut, dtype, state_dtype, rng):
    x, weight, bias, states = setup(rng, 12, dtype=dtype, state_dtype=state_dtype)
    parts = states.clone()
    out = prefill(x, weight, bias, states, [12], [2], [False])
    head = prefill(x[:, :cut], weight, bias, parts, [cut], [2], [False])
    tail = prefill(x[:, cut:], weight, bias, parts, [12 - cut], [2], [True])
    assert out.dtype == dtype
    assert torch.equal(torch.cat([head, tail], 1), out)
    assert torch.equal(parts, states)


def test_without_states_sequences_start_from_zeros(naive, rng):
    x, weight, bias, states = setup(rng, 7)
    want, _ = naive.causal_conv(x, weight, bias, torch.zeros_like(states[0]))
    torch.testing.assert_close(causal_conv1d_fn(x, weight, bias).double(), want, atol=1e-5, rtol=1e-5)


def test_no_tokens_at_all(rng):
    x, weight, bias, states = setup(rng, 0)
    before = states.clone()
    assert prefill(x, weight, bias, states, [0], [1], [True]).shape == (CHANNELS, 0)
    assert torch.equal(states, before)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[3], [4, -1, 0], [2, 1], [-1], [-1, -1]])
def test_update_equals_one_more_token_of_a_prefill(slots, state_dtype, rng):
    x, weight, bias, states = setup(rng, len(slots), state_dtype=state_dtype)
    other = states.clone()
    out = causal_conv1d_update(x.mT, states, weight, bias, "silu", conv_state_indices=torch.tensor(slots))
    lengths, resumes = [1] * len(slots), [True] * len(slots)
    want = prefill(x, weight, bias, other, lengths, slots, resumes).mT
    live = [row for row, slot in enumerate(slots) if slot >= 0]
    torch.testing.assert_close(out[live], want[live], atol=1e-6, rtol=1e-6)
    assert torch.equal(states, other)


def test_several_tokens_of_a_row_are_candidates_or_refused(rng):
    _, weight, bias, states = setup(rng, 1)
    with pytest.raises(NotImplementedError, match="one token per row"):
        causal_conv1d_update(torch.zeros(1, CHANNELS, 2), states, weight, bias, "silu")
