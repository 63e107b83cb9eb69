"""state_at: against the recurrence token by token, both fallbacks, transformers, and Triton against naive."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid_kernels.state_at import state_at
from tests.kernels.recurrences import FAMILIES, Tokens, chunk_starts, run, tokens


def ask(some: Tokens, *wanted: tuple[int, int, int]) -> dict[str, Tensor]:
    """cu_seqlens, sequence, position and slots for (sequence, position, slot)."""
    sequence, position, slots = (torch.tensor(column) for column in zip(*wanted, strict=True))
    return {"cu_seqlens": some.cu_seqlens, "sequence": sequence, "position": position, "slots": slots}


def prefill(family: str, lengths: list[int], **sizes: int) -> tuple[Tokens, list[list[Tensor]], Tensor]:
    """Tokens, the states after each of them, and the chunks' start states; sequences start from random states."""
    some = tokens(family, lengths, **sizes)
    shape = (len(lengths), *some.v.shape[1:], some.k.shape[2])
    initial = torch.randn(*shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * 0.3
    states = [run(some, i, initial[i]) for i in range(len(lengths))]
    return some, states, chunk_starts(some, states)


def pool(some: Tokens, slots: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full((slots, *some.v.shape[1:], some.k.shape[2]), torch.nan, dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 500])
def test_every_position_is_the_recurrence(family: str, length: int):
    some, states, h = prefill(family, [length], heads=3, key_heads=3)
    positions = sorted({0, 1, length // 2, length - 1, length} | set(range(0, length, 64)) | set(range(1, length, 61)))
    into = pool(some, len(positions))
    state_at(
        h, some.k, some.v, some.g, some.beta, into=into, delta=some.delta,
        **ask(some, *((0, p, slot) for slot, p in enumerate(positions))),
    )  # fmt: skip
    torch.testing.assert_close(into, torch.stack([states[0][p] for p in positions]), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_grouped_heads_and_skipped_slots(family: str):
    some, states, h = prefill(family, [0, 70, 0, 0, 1, 130, 64, 0], heads=4, key_heads=2, dv=6, dk=10)
    into = pool(some, 7)
    wanted = [(1, 69, 6), (1, 3, 0), (5, 128, 2), (6, 64, 3), (5, 100, -1), (4, 1, 4), (5, 65, 1)]
    state_at(h, some.k, some.v, some.g, some.beta, into=into, delta=some.delta, **ask(some, *wanted))
    for sequence, position, slot in wanted:
        if slot >= 0:
            torch.testing.assert_close(into[slot], states[sequence][position], rtol=1e-11, atol=1e-11)
    assert into[5].isnan().all()


def test_on_the_chunk_grid_it_is_h_to_the_bit():
    some, _, h = prefill("gdn", [200])
    h = h.to(torch.bfloat16)
    into = pool(some, 3, torch.float32)
    state_at(h, some.k, some.v, some.g, some.beta, into=into, **ask(some, (0, 0, 0), (0, 64, 1), (0, 192, 2)))
    assert torch.equal(into, h[[0, 1, 3]].float())


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_solved_values_need_no_delta_rule(family: str):
    """What FLA calls v_new: the written values, for which the rule is additive."""
    some, states, h = prefill(family, [100])
    k = some.k.repeat_interleave(some.v.shape[1], 1)
    decayed = [s * g.exp().reshape(g.shape[0], 1, -1) for s, g in zip(states[0], some.g, strict=False)]
    seen = torch.stack([torch.einsum("hvk,hk->hv", s, key) for s, key in zip(decayed, k, strict=True)])
    written = some.beta.unsqueeze(-1) * (some.v - seen)
    into = pool(some, 2)
    state_at(h, some.k, written, some.g, None, into=into, delta=False, **ask(some, (0, 33, 0), (0, 99, 1)))
    torch.testing.assert_close(into, torch.stack([states[0][33], states[0][99]]), rtol=1e-11, atol=1e-11)


def test_keys_are_scaled_to_unit_length_on_request():
    some, _, _ = prefill("gdn", [90])
    long = Tokens(some.k * 3.0, some.v, some.g, some.beta, some.cu_seqlens, True)
    states = run(some, 0)
    into = pool(some, 1)
    h = chunk_starts(some, [states])
    state_at(h, long.k, long.v, long.g, long.beta, into=into, l2norm=True, **ask(some, (0, 80, 0)))
    torch.testing.assert_close(into[0], states[80], rtol=1e-5, atol=1e-5)  # 1e-6 is added under the root


@pytest.mark.parametrize("position", [1, 40, 64, 77, 128, 150])
def test_both_fallbacks_agree(position: int):
    """Two-pass prefill (a second prefill up to the position) and chunked state passing (the rest of the chunk run from
    the chunk's start state), with the prefill of our CPU platform."""
    from sglang_hybrid.engine.cpu.gdn import chunk_gated_delta_rule

    some = tokens("gdn", [150], heads=4, key_heads=2, dv=16, dk=8).to(torch.float32)

    def run_prefill(part: Tokens, initial: Tensor) -> tuple[Tensor, Tensor]:
        slots = initial.unsqueeze(0).clone()
        inputs = [x.unsqueeze(0) for x in (part.k, part.k, part.v, part.g, part.beta)]
        _, _, h = chunk_gated_delta_rule(*inputs, slots, part.cu_seqlens, use_qk_l2norm_in_kernel=False)
        assert h is not None
        return h[0], slots[0]

    h, _ = run_prefill(some, torch.zeros(4, 16, 8))
    into = pool(some, 1, torch.float32)
    state_at(h, some.k, some.v, some.g, some.beta, into=into, **ask(some, (0, position, 0)))
    _, second_pass = run_prefill(some.cut((0, position)), torch.zeros(4, 16, 8))
    chunk = (position - 1) // 64
    _, passed = run_prefill(some.cut((chunk * 64, position)), h[chunk])
    torch.testing.assert_close(into[0], second_pass, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(into[0], passed, rtol=1e-5, atol=1e-5)


def test_transformers_ends_there_when_the_text_does():
    from sglang_hybrid.engine.cpu import vision

    vision.install()
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    some, _, _ = prefill("gdn", [100], heads=2, key_heads=2, dv=16, dk=8)
    some = some.to(torch.float32)
    ends = {}
    for end in (64, 90):
        q, k, v, g, beta = (x[:end].unsqueeze(0) for x in (some.k, some.k, some.v, some.g, some.beta))
        _, state = torch_chunk_gated_delta_rule(q, k, v, g, beta, initial_state=None, output_final_state=True)
        ends[end] = state[0].mT
    h = torch.stack([torch.zeros_like(ends[64]), ends[64]])
    into = pool(some, 1, torch.float32)
    state_at(h, some.k, some.v, some.g, some.beta, into=into, **ask(some, (0, 90, 0)))
    torch.testing.assert_close(into[0], ends[90], rtol=1e-4, atol=1e-5)


def test_mamba2_as_its_prefill_has_it():
    from sglang_hybrid.engine.cpu.mamba2 import mamba_chunk_scan_combined

    generator = torch.Generator().manual_seed(3)
    x, dt = torch.randn(1, 140, 4, 8, generator=generator), torch.rand(1, 140, 4, generator=generator)
    b, c = torch.randn(2, 1, 140, 2, 16, generator=generator)
    a = -torch.rand(4, generator=generator)
    cu_seqlens = torch.tensor([0, 50, 140])
    ends = torch.tensor([30, 137])
    h, _, tracked = mamba_chunk_scan_combined(
        x, dt, a, b, c, 64, cu_seqlens=cu_seqlens, out=torch.empty_like(x), return_varlen_states=True,
        return_track_states=True, track_seq_idx=torch.tensor([0, 1]), track_end_locs=ends,
    )  # fmt: skip
    assert h is not None
    assert tracked is not None
    starts = torch.stack([torch.zeros(4, 8, 16), torch.zeros(4, 8, 16), _mamba_state(x, dt, a, b, 50, 114)])
    into = torch.full((2, 4, 8, 16), torch.nan)
    state_at(
        starts, b[0], x[0], dt[0] * a, dt[0], cu_seqlens, torch.tensor([0, 1]), ends - torch.tensor([0, 50]), into,
        torch.tensor([0, 1]), delta=False,
    )  # fmt: skip
    torch.testing.assert_close(into, tracked[0], rtol=1e-5, atol=1e-5)


def _mamba_state(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, lo: int, hi: int) -> Tensor:
    """[H, P, N] state after tokens lo to hi from nothing."""
    state = torch.zeros(4, 8, 16)
    for t in range(lo, hi):
        state = state * (dt[0, t] * a).exp()[:, None, None]
        state = state + (x[0, t] * dt[0, t][:, None]).unsqueeze(-1) * b[0, t].repeat_interleave(2, 0).unsqueeze(1)
    return state


CASES = {
    "gdn": {"heads": 4, "key_heads": 2, "dv": 64, "dk": 64},
    "gdn, one head of 128": {"heads": 1, "dv": 128, "dk": 128},
    "kda": {"heads": 2, "key_heads": 2, "dv": 64, "dk": 64},
    "mamba2": {"heads": 4, "key_heads": 1, "dv": 64, "dk": 128},
    "gla": {"heads": 2, "key_heads": 2, "dv": 20, "dk": 24},
}


@pytest.mark.parametrize("name", CASES)
def test_triton_agrees_with_naive(interpreted: Any, name: str):
    some, _, h = prefill(name.split(",")[0], [0, 65, 1, 0, 130], **CASES[name])
    some, h = some.to(torch.float32), h.float()
    wanted = [(1, 64, 4), (1, 65, 0), (4, 127, 2), (4, 130, 1), (2, 0, 5), (4, 64, -1)]
    rest = {"delta": some.delta, **ask(some, *wanted)}
    into, expected = pool(some, 7, torch.float32), pool(some, 7, torch.float32)
    state_at(h, some.k, some.v, some.g, some.beta, into=expected, **rest)
    interpreted("state_at", h, some.k, some.v, some.g, some.beta, into=into, **rest)
    torch.testing.assert_close(into, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert into[3].isnan().all()
    assert torch.equal(into[5], h[2])


@pytest.mark.parametrize("family", ["gdn", "mamba2", "gla"])
@pytest.mark.parametrize("chunk", [16, 256])
def test_other_chunk_lengths(interpreted: Any, family: str, chunk: int):
    """Mamba2 models keep states every 128 or 256 tokens."""
    some = tokens(family, [20, 300], heads=2, key_heads=2, dv=16, dk=16)
    states = [run(some, 0), run(some, 1)]
    h = chunk_starts(some, states, chunk)
    wanted = [(0, 20, 0), (1, 300, 1), (1, 258, 2), (1, 70 if some.delta else 201, 3)]
    rest = {"delta": some.delta, "chunk": chunk, **ask(some, *wanted)}
    exact, rounded, single = pool(some, 4), pool(some, 4, torch.float32), some.to(torch.float32)
    state_at(h, some.k, some.v, some.g, some.beta, into=exact, **rest)
    torch.testing.assert_close(exact, torch.stack([states[i][p] for i, p, _ in wanted]), rtol=1e-11, atol=1e-11)
    interpreted("state_at", h.float(), single.k, single.v, single.g, single.beta, into=rounded, **rest)
    torch.testing.assert_close(rounded, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("delta", [True, False])
def test_triton_reads_strides_rounds_and_normalises(interpreted: Any, delta: bool):
    """k and v side by side, as the model has them, bfloat16 everywhere, a pool between other layers' pools."""
    some, _, h = prefill("gdn", [80], heads=2, key_heads=1, dv=16, dk=32)
    mixed = torch.cat([2 * some.k.flatten(1), some.v.flatten(1)], 1).bfloat16()
    k, v = mixed[:, :32].view(80, 1, 32), mixed[:, 32:].view(80, 2, 16)
    layers = torch.full((4, 3, 2, 16, 32), torch.nan, dtype=torch.bfloat16)
    expected = layers.clone()
    arguments = (h.bfloat16(), k, v, some.g.float(), some.beta.bfloat16())
    rest = {"delta": delta, "l2norm": True, **ask(some, (0, 79, 2), (0, 20, 0))}
    state_at(*arguments, into=expected[:, 1], **rest)
    interpreted("state_at", *arguments, into=layers[:, 1], **rest)
    torch.testing.assert_close(layers, expected, rtol=2**-7, atol=1e-3, equal_nan=True)
    assert layers[:, [0, 2]].isnan().all()


@pytest.mark.usefixtures("fixed_order")
def test_a_position_has_the_same_bits_alone_and_in_company(interpreted: Any):
    for call in (state_at, lambda *a, **k: interpreted("state_at", *a, **k)):
        for delta in (True, False):
            some, _, h = prefill("gdn", [70, 100], heads=2, dv=16, dk=16)
            some, h = some.to(torch.float32), h.float()
            alone, together = pool(some, 1, torch.float32), pool(some, 4, torch.float32)
            cut = some.cut((70, 170))
            call(h[2:], cut.k, cut.v, cut.g, cut.beta, into=alone, delta=delta, **ask(cut, (0, 90, 0)))
            wanted = [(0, 69, 0), (1, 90, 3), (1, 1, 2)]
            call(h, some.k, some.v, some.g, some.beta, into=together, delta=delta, **ask(some, *wanted))
            assert torch.equal(together[3], alone[0])


def arguments() -> dict[str, Any]:
    some, _, h = prefill("gdn", [70, 0])
    return {
        "h": h, "k": some.k, "v": some.v, "g": some.g, "beta": some.beta, "into": pool(some, 3),
        **ask(some, (0, 5, 1)),
    }  # fmt: skip


BAD = {
    "h must have shape": lambda a: {"h": a["h"][0]},
    "h must have 2 chunks of 64": lambda a: {"h": a["h"][:1]},
    "k must have shape": lambda a: {"k": a["k"][..., :4]},
    "heads must divide": lambda a: {"k": a["k"].repeat(1, 3, 1)},
    "v must have shape": lambda a: {"v": a["v"][:9]},
    "g must have shape": lambda a: {"g": a["g"][:, :1]},
    "beta must have shape": lambda a: {"beta": a["beta"][:, :1]},
    "into must have shape": lambda a: {"into": a["into"][..., :4]},
    "convert into": lambda a: {"into": a["into"].to(torch.int8)},
    "last dimension of k contiguous": lambda a: {"k": torch.zeros(70, 1, 16)[..., ::2]},
    "convert position": lambda a: {"position": torch.tensor([1.0])},
    "cu_seqlens must start with 0": lambda a: {"cu_seqlens": torch.tensor([1, 70, 70])},
    "must not be negative": lambda a: {"cu_seqlens": torch.tensor([0, 71, 70])},
    "number of tokens, 70": lambda a: {"cu_seqlens": torch.tensor([0, 60, 60])},
    "slots of the pool, 0 to 2": lambda a: {"slots": torch.tensor([3])},
    "sequence must be 0 to 1": lambda a: {"sequence": torch.tensor([2])},
    "empty sequence": lambda a: {"sequence": torch.tensor([1]), "position": torch.tensor([0])},
    "position must lie in its sequence, 0 to 70: 71": lambda a: {"position": torch.tensor([71])},
    "0 to 70: -1": lambda a: {"position": torch.tensor([-1])},
    "name each slot once": lambda a: {
        "slots": torch.tensor([1, 1]), "sequence": torch.tensor([0, 0]), "position": torch.tensor([2, 3])
    },
    "key size of at most 256": lambda a: {
        "h": torch.zeros(2, 2, 8, 320), "k": torch.zeros(70, 1, 320), "into": torch.zeros(3, 2, 8, 320)
    },
    "chunk must be one of": lambda a: {"chunk": 48},
    "one device": lambda a: {"v": a["v"].to("meta")},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_with_its_remedy(message: str):
    good = arguments()
    with pytest.raises(ValueError, match=message):
        state_at(**good | BAD[message](good))


def test_unchecked_requests_that_do_not_exist_are_skipped(interpreted: Any):
    for call in (state_at, lambda **k: interpreted("state_at", **k)):
        good = arguments()
        good["h"] = good["h"].float()
        wanted = ask(tokens("gdn", [70, 0]), (5, 1, 0), (0, 71, 0), (1, 0, 0), (0, 3, 9), (-1, 2, 0), (0, 64, 2))
        good |= wanted
        call(**good, check_slots=False)
        assert torch.equal(good["into"][2], good["h"][1].double())
        assert good["into"][:2].isnan().all()
