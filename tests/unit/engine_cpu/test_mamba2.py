"""The Mamba-2 scan and update against the float64 recurrence."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from sglang_hybrid.engine.cpu import mamba2

LENGTHS = [1, 63, 64, 65, 130, 500]
H, G, P, N = 6, 2, 8, 10
TIGHT = {"atol": 2e-5, "rtol": 1e-4}


class Batch:
    """Inputs of a packed batch and the parameters of a mixer."""

    def __init__(self, rng, *lengths, dtype=torch.float32, groups=G):
        self.bounds = torch.tensor([0, *lengths]).cumsum(0)
        tokens = sum(lengths)
        self.x = torch.randn(1, tokens, H, P, generator=rng).to(dtype)
        self.dt = (torch.randn(1, tokens, H, generator=rng) * 2).to(dtype)
        self.B, self.C = (torch.randn(1, tokens, groups, N, generator=rng).to(dtype) for _ in range(2))
        self.A = -torch.logspace(-3, 0.3, H)
        self.D, self.dt_bias = torch.randn(H, generator=rng), torch.randn(H, generator=rng)
        self.initial = torch.randn(len(lengths), H, P, N, generator=rng)

    def scan(self, chunk_size=64, initial=True, **options):
        out = torch.empty_like(self.x)
        options = {"return_track_states": True, "state_dtype": torch.float32, **options}
        result = mamba2.mamba_chunk_scan_combined(
            self.x, self.dt, self.A, self.B, self.C, chunk_size, D=self.D, dt_bias=self.dt_bias,
            initial_states=self.initial if initial else None, cu_seqlens=self.bounds, dt_softplus=True, out=out,
            return_varlen_states=True, **options,
        )  # fmt: skip
        return out, *result

    def steps(self):
        return F.softplus(self.dt.double() + self.dt_bias)

    def wanted(self, naive, initial=True):
        for i, (lo, hi) in enumerate(pairwise(self.bounds.tolist())):
            start = self.initial[i] if initial else torch.zeros(H, P, N)
            parts = (self.x, self.steps(), self.B, self.C)
            x, dt, b, c = (t[0, lo:hi] for t in parts)
            yield lo, hi, *naive.mamba2(x, dt, self.A, b, c, self.D, start)


@pytest.mark.parametrize("chunk_size", [16, 64, 256])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_scan_equals_the_recurrence(tokens, chunk_size, naive, rng):
    batch = Batch(rng, tokens)
    out, h, last, tracked = batch.scan(chunk_size)
    ((_, _, want, trail),) = batch.wanted(naive)
    assert tracked is None
    torch.testing.assert_close(out[0].double(), want, **TIGHT)
    torch.testing.assert_close(last[0].double(), trail[-1], **TIGHT)
    torch.testing.assert_close(h[0].double(), trail[:tokens:chunk_size], **TIGHT)


@pytest.mark.parametrize("initial", [True, False])
def test_packed_sequences_of_any_length_do_not_touch_each_other(initial, naive, rng):
    batch = Batch(rng, 65, 0, 1, 200, 64, 3)
    out, _, last, _ = batch.scan(initial=initial)
    for i, (lo, hi, want, trail) in enumerate(batch.wanted(naive, initial)):
        torch.testing.assert_close(out[0, lo:hi].double(), want, **TIGHT)
        torch.testing.assert_close(last[i].double(), trail[-1], **TIGHT)


def test_tracked_positions_need_no_alignment(naive, rng):
    batch = Batch(rng, 70, 0, 300)
    trails = [trail for *_, trail in batch.wanted(naive)]
    where = [(0, 0), (0, 64), (0, 70), (2, 70), (2, 71), (2, 198), (2, 333), (2, 370)]
    *_, tracked = batch.scan(
        track_seq_idx=torch.tensor([s for s, _ in where]), track_end_locs=torch.tensor([t for _, t in where])
    )
    for (sequence, token), state in zip(where, tracked[0].double(), strict=True):
        torch.testing.assert_close(state, trails[sequence][token - int(batch.bounds[sequence])], **TIGHT)


def test_the_packed_grid_holds_the_states_at_chunk_starts_and_nan_elsewhere(naive, rng):
    batch = Batch(rng, 128, 192, 50, 100)
    _, h, _, _ = batch.scan(64)
    assert h.shape[1] == 8
    trails = list(batch.wanted(naive))
    for row in range(8):
        lo, _, _, trail = next(t for t in trails if t[0] <= row * 64 < t[1])
        if (row * 64 - lo) % 64 == 0:
            torch.testing.assert_close(h[0, row].double(), trail[row * 64 - lo], **TIGHT)
        else:
            assert h[0, row].isnan().all()
    assert not h[0, :6].isnan().any()
    assert h[0, 6:].isnan().all()


def test_the_layout_of_the_oldest_engine_holds_each_sequences_whole_chunks(naive, rng):
    batch = Batch(rng, 130, 20, 64, 200)
    _, h, _ = batch.scan(64, return_track_states=False, return_intermediate_states=True)
    row = 0
    for lo, hi, _, trail in batch.wanted(naive):
        whole = (hi - lo) // 64
        for chunk in range(1, whole + 1):
            torch.testing.assert_close(h[0, row + chunk].double(), trail[chunk * 64], **TIGHT)
        row += whole


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 128, 199])
def test_a_scan_split_anywhere_goes_on_from_its_state(cut, rng):
    whole = Batch(rng, 200)
    out, _, last, _ = whole.scan()
    state, outputs = whole.initial, []
    for lo, hi in ((0, cut), (cut, 200)):
        part = Batch(rng, hi - lo)
        for name in ("x", "dt", "B", "C"):
            setattr(part, name, getattr(whole, name)[:, lo:hi])
        part.D, part.dt_bias, part.initial = whole.D, whole.dt_bias, state
        part_out, _, state, _ = part.scan()
        outputs.append(part_out)
    torch.testing.assert_close(torch.cat(outputs, 1), out, **TIGHT)
    torch.testing.assert_close(state, last, **TIGHT)


def test_initial_states_are_not_written(rng):
    batch = Batch(rng, 70)
    before = batch.initial.clone()
    batch.scan()
    assert torch.equal(batch.initial, before)


def test_bf16_inputs_are_accumulated_in_float32(naive, rng):
    batch = Batch(rng, 130, dtype=torch.bfloat16)
    out, h, last, _ = batch.scan(state_dtype=torch.bfloat16)
    ((_, _, want, trail),) = batch.wanted(naive)
    assert (out.dtype, h.dtype, last.dtype) == (torch.bfloat16,) * 3
    torch.testing.assert_close(out[0].double(), want, atol=1e-5, rtol=2**-8)
    torch.testing.assert_close(last[0].double(), trail[-1], atol=1e-5, rtol=2**-8)


def test_step_sizes_are_clamped(naive, rng):
    batch = Batch(rng, 30)
    out, *_ = batch.scan(dt_limit=(0.5, 1.0))
    want, _ = naive.mamba2(
        batch.x[0], batch.steps()[0].clamp(0.5, 1.0), batch.A, batch.B[0], batch.C[0], batch.D, batch.initial[0]
    )
    torch.testing.assert_close(out[0].double(), want, **TIGHT)


def test_no_tokens_at_all(rng):
    batch = Batch(rng, 0, 0)
    out, h, last, _ = batch.scan()
    assert (out.shape[1], h.shape[1]) == (0, 0)
    assert torch.equal(last, batch.initial)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [[3], [4, -1, 0], [2, 1], [-1]])
@pytest.mark.parametrize("expanded", [True, False])
def test_update_equals_the_recurrence(expanded, slots, dtype, naive, rng):
    rows = len(slots)
    batch = Batch(rng, rows)
    states = torch.randn(5, H, P, N, generator=rng).to(dtype)
    before = states.clone()
    x, dt, b, c = batch.x[0], batch.dt[0], batch.B[0], batch.C[0]
    A, bias = batch.A[:, None, None].expand(H, P, N), batch.dt_bias[:, None].expand(H, P)
    step, D = dt[:, :, None].expand(rows, H, P), batch.D[:, None].expand(H, P)
    if not expanded:
        A, bias, step = A.contiguous(), bias.contiguous(), step.contiguous()
    out = torch.empty(rows, H, P)
    mamba2.selective_state_update(
        states, x, step, A, b, c, D, dt_bias=bias, dt_softplus=True, state_batch_indices=torch.tensor(slots), out=out
    )
    tolerance = TIGHT if dtype == torch.float32 else {"atol": 1e-5, "rtol": 2**-8}
    for row, slot in enumerate(slots):
        start = before[slot] if slot >= 0 else torch.zeros(H, P, N)
        now = slice(row, row + 1)
        want, trail = naive.mamba2(x[now], batch.steps()[0, now], batch.A, b[now], c[now], batch.D, start)
        torch.testing.assert_close(out[now].double(), want, **TIGHT)
        if slot >= 0:
            torch.testing.assert_close(states[slot].double(), trail[-1], **tolerance)
    untouched = [slot for slot in range(5) if slot not in slots]
    assert torch.equal(states[untouched], before[untouched])


def test_several_tokens_of_a_row_are_candidates_or_refused():
    zeros = torch.zeros(1, H, P)
    state, A, b = torch.zeros(1, H, P, N), torch.zeros(H, P, N), torch.zeros(1, G, N)
    with pytest.raises(NotImplementedError, match="there is none"):
        mamba2.selective_state_update(state, zeros, zeros, A, b, b, out=zeros, disable_state_update=True)
    with pytest.raises(NotImplementedError, match="one token per row"):
        mamba2.selective_state_update(state, zeros[None], zeros[None], A, b, b, out=zeros)
