"""Kimi delta attention, chunked and one token at a time, against the float64 recurrence."""

from itertools import pairwise

import pytest
import torch

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cpu import gdn, kda
from sglang_hybrid_kernels.gates import log_decay
from tests.unit.engine_cpu.test_gdn import offsets, pool

HEADS, SIZE = 3, 32
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 130, 300]


def inputs(rng, tokens, strong=0.0):
    """q, k, v, raw gate, raw beta [1, tokens, ...], A_log and dt_bias; the larger `strong`, the faster it forgets."""
    q, k, v, raw = (torch.randn(1, tokens, HEADS, SIZE, generator=rng) for _ in range(4))
    A_log, dt_bias = torch.linspace(-3, strong, HEADS).view(1, 1, HEADS, 1), torch.randn(HEADS * SIZE, generator=rng)
    return q, k, v, raw, torch.randn(1, tokens, HEADS, generator=rng), A_log, dt_bias


def run(x, states, *lengths, slots=None, **more):
    q, k, v, raw, beta, A_log, dt_bias = x
    slots = torch.arange(len(lengths)) if slots is None else torch.tensor(slots, dtype=torch.int32)
    return kda.chunk_kda(
        q, k, v, raw, beta, initial_state=states, initial_state_indices=slots, cu_seqlens=offsets(*lengths),
        use_qk_l2norm_in_kernel=True, A_log=A_log, dt_bias=dt_bias, beta_is_raw=True, output_intermediate_states=True,
        **more,
    )  # fmt: skip


def want(naive, x, state, lower_bound=None):
    q, k, v, raw, beta, A_log, dt_bias = x
    g = log_decay(raw.double(), A_log, dt_bias, lower_bound)
    return naive.gated_delta_rule(q[0], k[0], v[0], g[0], beta[0].double().sigmoid(), state)


@pytest.mark.parametrize("strong", [0.0, 4.0])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_prefill_equals_the_recurrence(tokens, strong, naive, rng):
    """At its strongest a chunk forgets e^-3000 and more: exponents that are split in two would overflow."""
    x, states = inputs(rng, tokens, strong), pool(rng, 1, "plain")
    expected, trail = want(naive, x, states[0])
    out, h = run(x, states, tokens)
    torch.testing.assert_close(out[0].double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(h[0].double(), trail[: tokens : gdn.CHUNK], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[0].double(), trail[-1], atol=2e-5, rtol=1e-4)


def test_the_safe_gate_has_a_bound_and_a_rate_by_head(naive, rng):
    raw = torch.tensor([-100.0, 0.0, 100.0]).view(1, 1, 3).expand(1, HEADS, 3)
    bounded = log_decay(raw, torch.zeros(HEADS), torch.zeros(HEADS * 3), -5.0)
    torch.testing.assert_close(bounded[0, 0], torch.tensor([0.0, -2.5, -5.0]))
    x, states = inputs(rng, 130), pool(rng, 1, "plain")
    expected, trail = want(naive, x, states[0], -5.0)
    out, _ = run(x, states, 130, lower_bound=-5.0)
    torch.testing.assert_close(out[0].double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[0].double(), trail[-1], atol=2e-5, rtol=1e-4)


def test_packed_sequences_and_the_snapshot_of_one_chunk_each(naive, rng):
    lengths, slots = [65, 0, 1, 200, 64], [4, 1, 0, 3, 5]
    x, states = inputs(rng, sum(lengths)), pool(rng, 6, "plain")
    before, snapshot = states.clone(), torch.full((5, HEADS, SIZE, SIZE), -1.0)
    tracked = torch.tensor([1, -1, 0, 2, -1], dtype=torch.int32)
    out, h = run(x, states, *lengths, slots=slots, track_state=snapshot, track_chunk_idx=tracked)
    row = 0
    for i, ((lo, hi), slot) in enumerate(zip(pairwise(offsets(*lengths).tolist()), slots, strict=True)):
        own = [t[:, lo:hi] for t in x[:5]] + list(x[5:])
        expected, trail = want(naive, own, before[slot])
        torch.testing.assert_close(out[0, lo:hi].double(), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(states[slot].double(), trail[-1], atol=2e-5, rtol=1e-4)
        starts = trail[: hi - lo : gdn.CHUNK]
        torch.testing.assert_close(h[0, row : row + len(starts)].double(), starts, atol=2e-5, rtol=1e-4)
        row += len(starts)
        chunk = int(tracked[i])
        kept = starts[chunk] if chunk >= 0 else torch.full_like(starts[:1], -1.0)[0] if len(starts) else snapshot[i]
        torch.testing.assert_close(snapshot[i].double(), kept.double(), atol=2e-5, rtol=1e-4)
    assert torch.equal(states[2], before[2])


def test_what_is_ready_is_taken_as_it_is(naive, rng):
    q, k, v, raw, beta, A_log, dt_bias = inputs(rng, 70)
    one, other = pool(rng, 1, "plain"), None
    other = one.clone()
    expected, _ = run((q, k, v, raw, beta, A_log, dt_bias), one, 70)
    out = kda.chunk_kda(
        q, k, v, log_decay(raw, A_log, dt_bias), beta.sigmoid(), initial_state=other, cu_seqlens=offsets(70),
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_decode_equals_prefill(lower_bound, rng):
    x, whole = inputs(rng, 40), pool(rng, 2, "plain")
    steps = whole.clone()
    expected, _ = run(x, whole, 40, slots=[1], lower_bound=lower_bound)
    q, k, v, raw, beta, A_log, dt_bias = x
    for t in range(40):
        row = slice(t, t + 1)
        out = kda.recurrent_kda(
            A_log=A_log, dt_bias=dt_bias, q=q[:, row], k=k[:, row], v=v[:, row], a=raw[:, row].flatten(2),
            b=beta[:, row], initial_state_source=steps, initial_state_indices=torch.tensor([1]), is_kda=True,
            lower_bound=lower_bound, replayssm_rawv=None,
        )  # fmt: skip
        torch.testing.assert_close(out, expected[:, row], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(steps, whole, atol=2e-5, rtol=1e-4)


def test_candidates_of_a_tree_leave_their_states_in_the_buffer(naive, rng):
    x, states = inputs(rng, 4), pool(rng, 1, "plain")
    q, k, v, raw, beta, A_log, dt_bias = x
    parents = torch.tensor([[-1, 0, 0, 2]])
    left = torch.zeros(1, 4, HEADS, SIZE, SIZE)
    before = states.clone()
    out = kda.recurrent_kda(
        A_log=A_log, dt_bias=dt_bias, q=q, k=k, v=v, a=raw, b=beta, initial_state_source=states,
        initial_state_indices=torch.tensor([0]), is_kda=True, disable_state_update=True, cache_steps=4,
        intermediate_states_buffer=left, intermediate_state_indices=torch.tensor([0]), retrieve_parent_token=parents,
    )  # fmt: skip
    assert torch.equal(states, before)
    for node, path in ((1, [0, 1]), (3, [0, 2, 3])):
        own = [t[:, path] for t in x[:5]] + list(x[5:])
        expected, trail = want(naive, own, before[0])
        torch.testing.assert_close(out[0, node].double(), expected[-1], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(left[0, node].double(), trail[-1], atol=2e-5, rtol=1e-4)


def test_rings_and_a_missing_pool_are_refused(rng):
    with pytest.raises(NotImplementedError, match="--enable-linear-replayssm-spec"):
        kda.recurrent_kda(cache_ring=True)
    q, k, v, raw, beta, *_ = inputs(rng, 2)
    with pytest.raises(NotImplementedError, match="a pool of states"):
        kda.chunk_kda(q, k, v, raw, beta)


def test_chunks_and_states_are_those_of_sglangs_kernels(interpreted):
    """With it stands which state a server on a GPU files under which tokens: the order of `h` is that of the oracle."""
    *others, snapshot = map(float, interpreted("tests.unit.engine_cpu.kda_oracle").split())
    assert max(others) < 4e-3, "as far apart as products of bfloat16 numbers"
    if compat.engine_version() != "0.5.17":  # which has no snapshot
        assert snapshot < 4e-3
