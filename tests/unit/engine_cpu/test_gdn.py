"""The gated delta rule, chunked and one token at a time, against the float64 recurrence."""

from itertools import pairwise

import pytest
import torch

from sglang_hybrid.engine.cpu import gdn

LENGTHS = [1, 63, 64, 65, 130, 500]
HEADS = {"grouped": (2, 4, 16, 24), "plain": (3, 3, 32, 32)}


def inputs(rng, tokens, heads="grouped", dtype=torch.float32):
    """q, k, v, g, beta of a packed batch [1, tokens, ...]; decays from almost none to strong."""
    hk, hv, dk, dv = HEADS[heads]
    q, k = (torch.randn(1, tokens, hk, dk, generator=rng).to(dtype) for _ in range(2))
    v = torch.randn(1, tokens, hv, dv, generator=rng).to(dtype)
    g = -torch.rand(1, tokens, hv, generator=rng) * torch.logspace(-3, 0.5, hv)
    return q, k, v, g, torch.rand(1, tokens, hv, generator=rng)


def pool(rng, slots, heads="grouped", dtype=torch.float32):
    _, hv, dk, dv = HEADS[heads]
    return torch.randn(slots, hv, dv, dk, generator=rng).to(dtype)


def offsets(*lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def run(x, states, *lengths, slots=None):
    slots = torch.arange(len(lengths)) if slots is None else torch.tensor(slots, dtype=torch.int32)
    return gdn.chunk_gated_delta_rule(
        *x, initial_state=states, cu_seqlens=offsets(*lengths), initial_state_indices=slots
    )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_prefill_equals_the_recurrence(tokens, heads, naive, rng):
    x, states = inputs(rng, tokens, heads), pool(rng, 1, heads)
    want, trail = naive.gated_delta_rule(*(t[0] for t in x), states[0])
    out, none, h = run(x, states, tokens)
    assert none is None
    torch.testing.assert_close(out[0].double(), want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(h[0].double(), trail[: tokens : gdn.CHUNK], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[0].double(), trail[-1], atol=2e-5, rtol=1e-4)


def test_packed_sequences_of_any_length_do_not_touch_each_other(naive, rng):
    lengths = [65, 0, 1, 200, 64, 3]
    x, states = inputs(rng, sum(lengths)), pool(rng, 9)
    slots = [7, 2, 0, 5, 3, 8]
    before = states.clone()
    out, _, h = run(x, states, *lengths, slots=slots)
    row = 0
    for (lo, hi), slot in zip(pairwise(offsets(*lengths).tolist()), slots, strict=True):
        want, trail = naive.gated_delta_rule(*(t[0, lo:hi] for t in x), before[slot])
        torch.testing.assert_close(out[0, lo:hi].double(), want, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(states[slot].double(), trail[-1], atol=2e-5, rtol=1e-4)
        starts = trail[: hi - lo : gdn.CHUNK]
        torch.testing.assert_close(h[0, row : row + len(starts)].double(), starts, atol=2e-5, rtol=1e-4)
        row += len(starts)
    assert row == h.shape[1]
    untouched = [slot for slot in range(9) if slot not in slots] + [2]
    assert torch.equal(states[untouched], before[untouched])


def test_a_padding_slot_starts_from_zeros_and_is_not_written(naive, rng):
    x, states = inputs(rng, 90), pool(rng, 2)
    before = states.clone()
    out, _, _ = run(x, states, 70, 20, slots=[-1, 1])
    want, _ = naive.gated_delta_rule(*(t[0, :70] for t in x), torch.zeros_like(before[0]))
    torch.testing.assert_close(out[0, :70].double(), want, atol=2e-5, rtol=1e-4)
    assert torch.equal(states[0], before[0])
    assert not torch.equal(states[1], before[1])


@pytest.mark.parametrize("cut", [1, 17, 63, 64, 65, 128, 199])
def test_a_prefill_split_anywhere_goes_on_from_its_state(cut, rng):
    x, whole = inputs(rng, 200), pool(rng, 1)
    parts = whole.clone()
    out, _, _ = run(x, whole, 200)
    head, _, _ = run([t[:, :cut] for t in x], parts, cut)
    tail, _, _ = run([t[:, cut:] for t in x], parts, 200 - cut)
    torch.testing.assert_close(torch.cat([head, tail], 1), out, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(parts, whole, atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("fixed_order")
def test_a_prefill_split_at_a_chunk_boundary_is_bit_exact(rng):
    x, whole = inputs(rng, 300), pool(rng, 1)
    parts = whole.clone()
    out, _, h = run(x, whole, 300)
    run([t[:, :128] for t in x], parts, 128)
    assert torch.equal(parts[0], h[0, 2])
    tail, _, _ = run([t[:, 128:] for t in x], parts, 172)
    assert torch.equal(tail, out[:, 128:])
    assert torch.equal(parts, whole)


def test_blocks_of_chunks_do_not_change_the_result(rng, monkeypatch):
    x, states = inputs(rng, 700), pool(rng, 3)
    again = states.clone()
    want = run(x, states, 400, 100, 200)
    monkeypatch.setattr(gdn, "_BLOCK_ELEMENTS", 1)
    got = run(x, again, 400, 100, 200)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(again, states, atol=1e-6, rtol=1e-5)


def test_strong_decay_and_repeated_keys_stay_finite_and_right(naive, rng):
    q, k, v, g, beta = inputs(rng, 130)
    k = k[:, :1].expand_as(k).contiguous()
    g = torch.full_like(g, -40.0)
    g[:, ::7] = 0.0
    states = pool(rng, 1)
    want, trail = naive.gated_delta_rule(q[0], k[0], v[0], g[0], torch.ones_like(beta[0]), states[0])
    out, _, _ = run((q, k, v, g, torch.ones_like(beta)), states, 130)
    torch.testing.assert_close(out[0].double(), want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[0].double(), trail[-1], atol=2e-5, rtol=1e-4)


def test_bf16_inputs_are_accumulated_in_float32(naive, rng):
    x, states = inputs(rng, 130, dtype=torch.bfloat16), pool(rng, 1, dtype=torch.bfloat16)
    want, trail = naive.gated_delta_rule(*(t[0] for t in x), states[0])
    out, _, h = run(x, states, 130)
    assert (out.dtype, h.dtype, states.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    torch.testing.assert_close(out[0].double(), want, atol=1e-6, rtol=2**-8)
    torch.testing.assert_close(h[0].double(), trail[:130:64], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[0].double(), trail[-1], atol=1e-6, rtol=2**-8)


def test_no_tokens_at_all(rng):
    x, states = inputs(rng, 0), pool(rng, 2)
    before = states.clone()
    out, _, h = run(x, states, 0, 0)
    assert out.shape == x[2].shape
    assert h is None
    assert torch.equal(states, before)


def test_heads_first_is_refused(rng):
    with pytest.raises(NotImplementedError, match="head_first=True"):
        gdn.chunk_gated_delta_rule(*inputs(rng, 2), pool(rng, 1), offsets(2), head_first=True)


def test_gating_equals_its_definition(naive, rng):
    A_log, dt_bias = torch.randn(4, generator=rng), torch.randn(4, generator=rng)
    a, b = (torch.randn(9, 4, generator=rng) * 8 for _ in range(2))
    given = (a.clone(), b.clone())
    g, beta = gdn.gating(A_log, a, b, dt_bias)
    assert torch.equal(a, given[0])
    assert torch.equal(b, given[1])
    want_g, want_beta = naive.gating(A_log, a, b, dt_bias)
    assert (g.dtype, g.shape, beta.dtype, beta.shape) == (torch.float32, (1, 9, 4), torch.float32, (1, 9, 4))
    torch.testing.assert_close(g[0].double(), want_g, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(beta[0].double(), want_beta, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[3], [1, -1, 4], [5, 2], [-1]])
@pytest.mark.parametrize("heads", HEADS)
def test_decode_equals_the_recurrence(heads, slots, dtype, naive, rng):
    rows = len(slots)
    q, k, v, _, _ = inputs(rng, rows, heads)
    hv = v.shape[2]
    a, b = (torch.randn(rows, hv, generator=rng) for _ in range(2))
    A_log, dt_bias = torch.randn(hv, generator=rng), torch.randn(hv, generator=rng)
    states = pool(rng, 6, heads, dtype)
    before = states.clone()
    out = gdn.recurrent_gated_delta_rule(A_log, dt_bias, q, k, v, a, b, states, torch.tensor(slots))
    g, beta = naive.gating(A_log, a, b, dt_bias)
    tolerance = {"atol": 1e-5, "rtol": 1e-4 if dtype == torch.float32 else 2**-8}
    for row, slot in enumerate(slots):
        start = before[slot] if slot >= 0 else torch.zeros_like(before[0])
        x = (t[0, row : row + 1] for t in (q, k, v))
        want, trail = naive.gated_delta_rule(*x, g[row : row + 1], beta[row : row + 1], start)
        torch.testing.assert_close(out[0, row : row + 1].double(), want, atol=1e-5, rtol=1e-4)
        if slot >= 0:
            torch.testing.assert_close(states[slot].double(), trail[-1], **tolerance)
    untouched = [slot for slot in range(6) if slot not in slots]
    assert torch.equal(states[untouched], before[untouched])


def test_decode_goes_on_from_a_prefill(rng):
    _, hv, dk, dv = HEADS["grouped"]
    q, k, v, _, _ = inputs(rng, 70)
    a, b = (torch.randn(70, hv, generator=rng) for _ in range(2))
    A_log, dt_bias = torch.randn(hv, generator=rng), torch.randn(hv, generator=rng)
    whole, parts = torch.zeros(1, hv, dv, dk), torch.zeros(1, hv, dv, dk)
    out, _, _ = run((q, k, v, *gdn.gating(A_log, a, b, dt_bias)), whole, 70)
    run([t[:, :66] for t in (q, k, v, *gdn.gating(A_log, a, b, dt_bias))], parts, 66)
    for t in range(66, 70):
        now = slice(t, t + 1)
        step = gdn.recurrent_gated_delta_rule(
            A_log, dt_bias, q[:, now], k[:, now], v[:, now], a[now], b[now], parts, torch.tensor([0])
        )
        torch.testing.assert_close(step, out[:, now], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(parts, whole, atol=2e-5, rtol=1e-4)


def test_another_softplus_is_refused(rng):
    q, k, v, _, _ = inputs(rng, 1)
    with pytest.raises(NotImplementedError, match=r"beta=2\.0"):
        gdn.recurrent_gated_delta_rule(
            *[torch.zeros(4)] * 2, q, k, v, *[torch.zeros(1, 4)] * 2, pool(rng, 1), torch.tensor([0]), softplus_beta=2.0
        )
