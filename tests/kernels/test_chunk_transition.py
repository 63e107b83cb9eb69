"""chunk_transition: against two passes of the recurrence, the composition law, Triton against naive, equal bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid_kernels.chunk_transition import chunk_transition
from sglang_hybrid_kernels.compose import compose
from tests.kernels.recurrences import FAMILIES, Tokens, run, tokens


def pools(some: Tokens, entries: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """end_state, transition and vanishing, poisoned."""
    heads, dv, dk = *some.v.shape[1:], some.k.shape[2]
    tail = [dk, dk] if some.delta else [dk] if some.g.dim() == 3 else []
    return {
        "end_state": torch.full((entries, heads, dv, dk), torch.nan, dtype=dtype),
        "transition": torch.full((entries, heads, *tail), torch.nan, dtype=dtype),
        "vanishing": torch.ones(entries, heads, dtype=torch.bool),
    }


def call(operation: Callable[..., None], some: Tokens, entries: list[int], **rest: Any) -> None:
    operation(some.k, some.v, some.g, some.beta, some.cu_seqlens, torch.tensor(entries), delta=some.delta, **rest)


def two_passes(some: Tokens, segment: int) -> tuple[Tensor, Tensor]:
    """(end state, transition as it is stored): once from zero, once from the identity with nothing to write."""
    heads, dk = some.v.shape[1], some.k.shape[2]
    end_state = run(some, segment)[-1]
    lo, hi = some.bounds[segment]
    if not some.delta:
        return end_state, some.g[lo:hi].sum(0).exp()
    silent = Tokens(some.k, some.k.new_zeros(some.k.shape[0], heads, dk), some.g, some.beta, some.cu_seqlens, True)
    return end_state, run(silent, segment, torch.eye(dk, dtype=some.k.dtype).repeat(heads, 1, 1))[-1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 500])
def test_one_pass_gives_what_two_give(family: str, length: int):
    some = tokens(family, [length], heads=3, key_heads=3)
    made = pools(some, 1)
    call(chunk_transition, some, [0], **made)
    end_state, transition = two_passes(some, 0)
    torch.testing.assert_close(made["end_state"][0], end_state, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(made["transition"][0], transition, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_segments_land_in_their_entries(family: str):
    some = tokens(family, [0, 70, 5, 0, 130, 9, 0], heads=4, key_heads=2, dv=6, dk=10)
    made = pools(some, 8)
    entries = [6, 0, -1, 2, 5, 7, -1]
    call(chunk_transition, some, entries, **made)
    for segment, entry in enumerate(entries):
        if entry >= 0:
            end_state, transition = two_passes(some, segment)
            torch.testing.assert_close(made["end_state"][entry], end_state, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(made["transition"][entry], transition, rtol=1e-11, atol=1e-11)
            largest = transition.abs().reshape(4, -1).amax(1)
            assert torch.equal(made["vanishing"][entry], largest <= 1e-6)
    untouched = [1, 3, 4]
    assert made["end_state"][untouched].isnan().all()
    assert made["transition"][untouched].isnan().all()
    assert made["vanishing"][untouched].all()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_operator_carries_any_state_over_the_segment(family: str):
    some = tokens(family, [150], heads=2, key_heads=2)
    made = pools(some, 1)
    call(chunk_transition, some, [0], **made)
    before = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    t = made["transition"][0]
    carried = before @ t if some.delta else before * t.reshape(2, 1, -1)
    expected = run(some, 0, before)[-1]
    torch.testing.assert_close(carried + made["end_state"][0], expected, rtol=1e-11, atol=1e-11)
    started = torch.full_like(made["end_state"], torch.nan)
    call(chunk_transition, some, [0], end_state=started, initial=before[None], initial_slots=torch.tensor([0]))
    torch.testing.assert_close(started[0], expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_compose_reads_the_entries_as_they_are_written(family: str):
    """Three segments made apart and in one batch, then composed behind a state: the whole text."""
    some = tokens(family, [70, 9, 130], heads=2, key_heads=2)
    made = pools(some, 4)
    call(chunk_transition, some, [2, 0, 3], **made)
    before = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    states = torch.stack([torch.zeros_like(before), before]).unsqueeze(0)
    rows = {"source": torch.tensor([1]), "destination": torch.tensor([0])}
    chain = {"chain": torch.tensor([2, 0, 3]), "chain_offsets": torch.tensor([0, 3])}
    compose(states, **rows, **chain, **{name: made[name].unsqueeze(0) for name in ("transition", "end_state")})
    whole = Tokens(some.k, some.v, some.g, some.beta, torch.tensor([0, 209]), some.delta)
    torch.testing.assert_close(states[0, 0], run(whole, 0, before)[-1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_forget_are_flagged(interpreted: Any, family: str):
    some = tokens(family, [90], heads=3, key_heads=3, dv=16, dk=16).to(torch.float32)
    some.g.mul_(0.1)[:, 1] -= 0.5
    for operation in (chunk_transition, lambda *a, **k: interpreted("chunk_transition", *a, **k)):
        made = pools(some, 2, torch.float32)
        call(operation, some, [1], **made)
        assert made["vanishing"].tolist() == [[True, True, True], [False, True, False]]
        call(operation, some, [1], **made | {"vanishing_below": 2.0})
        assert made["vanishing"].all()


def test_repeated_keys_without_decay_stay_exact(interpreted: Any):
    """The hardest triangular system: equal keys, full write strength, no decay. An inverse by powers would break."""
    some = tokens("gdn", [200], heads=1, dv=16, dk=16)
    some = Tokens(some.k[:1].repeat(200, 1, 1), some.v, 0 * some.g, torch.ones_like(some.beta), some.cu_seqlens, True)
    end_state, transition = two_passes(some, 0)
    for operation in (chunk_transition, lambda *a, **k: interpreted("chunk_transition", *a, **k)):
        made = pools(some, 1, torch.float32)
        call(operation, some.to(torch.float32), [0], **made)
        torch.testing.assert_close(made["end_state"][0], end_state.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(made["transition"][0], transition.float(), rtol=1e-5, atol=1e-5)


def test_strong_decay_neither_overflows_nor_loses_the_rest(interpreted: Any):
    for family in ("gdn", "kda"):
        some = tokens(family, [130], heads=2, key_heads=2, dv=16, dk=16)
        some.g[30:90] -= 40.0  # sums beyond what exp can hold, and 2400 in float32 has steps of 2e-4
        end_state, transition = two_passes(some, 0)
        for operation in (chunk_transition, lambda *a, **k: interpreted("chunk_transition", *a, **k)):
            made = pools(some, 1, torch.float32)
            call(operation, some.to(torch.float32), [0], **made)
            torch.testing.assert_close(made["end_state"][0], end_state.float(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(made["transition"][0], transition.float(), rtol=1e-4, atol=1e-4)


CASES: dict[str, tuple[list[int], dict[str, int]]] = {
    "gdn": ([0, 65, 1, 0, 130], {"heads": 4, "key_heads": 2, "dv": 64, "dk": 64}),
    "gdn, one head of 128": ([63, 64], {"heads": 1, "dv": 128, "dk": 128}),
    "gdn, long": ([500], {"heads": 1, "dv": 64, "dk": 64}),
    "kda": ([0, 65, 1, 0, 130], {"heads": 2, "key_heads": 2, "dv": 64, "dk": 64}),
    "kda, one head of 128": ([63, 64], {"heads": 1, "dv": 128, "dk": 128}),
    "kda, odd sizes": ([70], {"heads": 2, "key_heads": 2, "dv": 20, "dk": 24}),
    "mamba2": ([0, 65, 1, 0, 130], {"heads": 4, "key_heads": 1, "dv": 64, "dk": 128}),
    "gla": ([0, 65, 1, 0, 130], {"heads": 2, "key_heads": 2, "dv": 20, "dk": 24}),
}


@pytest.mark.parametrize("name", CASES)
def test_triton_agrees_with_naive(interpreted: Any, name: str):
    lengths, sizes = CASES[name]
    some = tokens(name.split(",")[0], lengths, **sizes).to(torch.float32)
    entries = [3, 0, -1, 4, 1][: len(lengths)]
    got, expected = pools(some, 6, torch.float32), pools(some, 6, torch.float32)
    initial = torch.randn(2, *expected["end_state"].shape[1:], generator=torch.Generator().manual_seed(1))
    rest = {"initial": initial, "initial_slots": torch.tensor([1, -1, 0, -1, 0])[: len(lengths)]}
    call(chunk_transition, some, entries, **expected, **rest)
    call(lambda *a, **k: interpreted("chunk_transition", *a, **k), some, entries, **got, **rest)
    for part in expected:
        torch.testing.assert_close(got[part], expected[part], rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_triton_reads_strides_and_rounds_like_the_stock_kernels(interpreted: Any, family: str):
    """bfloat16 tokens side by side, keys to be scaled, entries between other layers' entries."""
    some = tokens(family, [100, 30], heads=2, key_heads=1, dv=16, dk=32)
    mixed = torch.cat([2 * some.k.flatten(1), some.v.flatten(1)], 1).bfloat16()
    k, v = mixed[:, :32].view(130, 1, 32), mixed[:, 32:].view(130, 2, 16)
    half = Tokens(k, v, some.g.float(), some.beta.bfloat16(), some.cu_seqlens, some.delta)
    made, expected = pools(half, 12, torch.bfloat16), pools(half, 12, torch.float32)
    layers = {name: pool.view(3, 4, *pool.shape[1:])[:, 1] for name, pool in made.items()}
    one_layer = {name: pool.view(3, 4, *pool.shape[1:])[:, 1] for name, pool in expected.items()}
    call(lambda *a, **k: interpreted("chunk_transition", *a, **k), half, [2, 0], l2norm=True, **layers)
    call(chunk_transition, half, [2, 0], l2norm=True, **one_layer)
    for name in ("end_state", "transition"):
        error = (layers[name][[0, 2]].float() - one_layer[name][[0, 2]]).norm() / one_layer[name][[0, 2]].norm()
        assert error < 0.01, (name, error)
    assert made["end_state"].isnan().sum() == made["end_state"].numel() * 10 // 12
    assert torch.equal(made["vanishing"], expected["vanishing"])


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_eight_bit_entries(interpreted: Any, backend: str):
    operation = chunk_transition if backend == "naive" else lambda *a, **k: interpreted("chunk_transition", *a, **k)
    some = tokens("gdn", [80, 20], heads=2, dv=16, dk=32).to(torch.float32)
    expected = pools(some, 4, torch.float32)
    call(chunk_transition, some, [3, 0], **expected)
    stored = {name: torch.zeros_like(expected[name], dtype=torch.int8) for name in ("end_state", "transition")}
    scales = {f"{name}_scale": torch.full((4, 2, 32), torch.nan) for name in stored}
    call(operation, some, [3, 0], **stored, **scales)
    for name in stored:
        restored = stored[name] * scales[f"{name}_scale"].unsqueeze(-2)
        error = (restored[[0, 3]] - expected[name][[0, 3]]).norm() / expected[name][[0, 3]].norm()
        assert error < 0.02, (name, error)
        assert scales[f"{name}_scale"][1:3].isnan().all()
        assert not stored[name][1:3].any()


def test_compose_reads_eight_bit_entries():
    some = tokens("gdn", [150], heads=2, key_heads=2, dv=8, dk=16).to(torch.float32)
    stored = {name: torch.zeros_like(pools(some, 1)[name], dtype=torch.int8) for name in ("end_state", "transition")}
    scales = {f"{name}_scale": torch.zeros(1, 2, 16) for name in stored}
    call(chunk_transition, some, [0], **stored, **scales)
    before = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(5))
    states = torch.stack([torch.zeros_like(before), before]).unsqueeze(0)
    one = torch.tensor([0])
    entries = {name: pool.unsqueeze(0) for name, pool in (stored | scales).items()}
    compose(states, one + 1, one, one, torch.tensor([0, 1]), **entries)
    expected = run(some, 0, before)[-1]
    assert (states[0, 0] - expected).norm() / expected.norm() < 0.02


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hit_and_cold_run_have_equal_bits_on_the_chunk_grid(
    interpreted: Any, backend: str, family: str, dtype: torch.dtype
):
    """A text run in one go; the same text cut at 64 and 192 and continued from float32 states, in other company."""
    operation = chunk_transition if backend == "naive" else lambda *a, **k: interpreted("chunk_transition", *a, **k)
    some = tokens(family, [33, 230, 70], heads=1, dv=16, dk=16).to(torch.float32)
    some = Tokens(some.k.to(dtype), some.v.to(dtype), some.g, some.beta, some.cu_seqlens, some.delta)
    shape = (6, 1, 16, 16)
    cold = torch.full(shape, torch.nan)
    call(operation, some.cut((33, 263)), [0], end_state=cold)

    states = torch.zeros(shape)
    call(operation, some.cut((0, 33), (33, 97), (263, 333)), [2, 0, 3], end_state=states)
    after = torch.zeros(shape)
    both = {"initial": states, "initial_slots": torch.tensor([3, 0])}
    call(operation, some.cut((0, 20), (97, 225)), [5, 1], end_state=after, **both)
    hit = torch.zeros(shape)
    call(operation, some.cut((225, 263)), [4], end_state=hit, initial=after, initial_slots=torch.tensor([1]))
    assert torch.equal(hit[4], cold[0])


@pytest.mark.usefixtures("fixed_order")
@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_an_operator_has_the_same_bits_alone_and_in_company(interpreted: Any, backend: str):
    operation = chunk_transition if backend == "naive" else lambda *a, **k: interpreted("chunk_transition", *a, **k)
    some = tokens("gdn", [33, 130, 70], heads=2, dv=16, dk=16).to(torch.float32)
    alone, together = pools(some, 1, torch.float32), pools(some, 3, torch.float32)
    call(operation, some.cut((33, 163)), [0], **alone)
    call(operation, some, [1, 2, 0], **together)
    for name in alone:
        assert torch.equal(alone[name][0], together[name][2])


def arguments() -> dict[str, Any]:
    some = tokens("gdn", [70, 3])
    return {
        "k": some.k, "v": some.v, "g": some.g, "beta": some.beta, "cu_seqlens": some.cu_seqlens,
        "entries": torch.tensor([1, 0]), **pools(some, 3),
    }  # fmt: skip


EIGHT = torch.zeros(3, 2, 8, 8, dtype=torch.int8)
BAD: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "k must have shape": lambda a: {"k": a["k"][0]},
    "v must have shape": lambda a: {"v": a["v"][:9]},
    "heads must divide": lambda a: {"k": a["k"].repeat(1, 3, 1)},
    "g must have shape": lambda a: {"g": a["g"][:, :1]},
    "beta must have shape": lambda a: {"beta": a["beta"][:1]},
    "convert v to one of": lambda a: {"v": a["v"].to(torch.int32)},
    "last dimension of v contiguous": lambda a: {"v": torch.zeros(73, 2, 16)[..., ::2]},
    "end_state must have shape": lambda a: {"end_state": a["end_state"][..., :4]},
    r"transition must have shape \[3, 2, 8, 8\]": lambda a: {"transition": a["transition"][..., 0]},
    r"transition must have shape \[3, 2\]": lambda a: {"delta": False},
    "give end_state_scale exactly when": lambda a: {"end_state": EIGHT},
    "give transition_scale exactly when": lambda a: {"transition_scale": torch.zeros(3, 2, 8)},
    r"transition_scale must have shape": lambda a: {"transition": EIGHT, "transition_scale": torch.zeros(3, 8)},
    "vanishing must have shape": lambda a: {"vanishing": a["vanishing"][:2]},
    "convert vanishing to one of bool": lambda a: {"vanishing": torch.zeros(3, 2)},
    "vanishing_below must not be negative": lambda a: {"vanishing_below": -1.0},
    "ask for transition": lambda a: {"transition": None},
    "initial and initial_slots together": lambda a: {"initial": torch.zeros(3, 2, 8, 8)},
    "initial must not be end_state": lambda a: {"initial": a["end_state"], "initial_slots": torch.tensor([0, 1])},
    "initial_slots must name slots": lambda a: {
        "initial": torch.zeros(3, 2, 8, 8), "initial_slots": torch.tensor([0, 3])
    },
    r"entries must have shape \[2\]": lambda a: {"entries": torch.tensor([1])},
    "entries must name slots of the pool, 0 to 2": lambda a: {"entries": torch.tensor([1, 3])},
    "name each entry once": lambda a: {"entries": torch.tensor([1, 1])},
    "cu_seqlens must end at the number of tokens, 73": lambda a: {"cu_seqlens": torch.tensor([0, 70, 72])},
    "must not be negative": lambda a: {"cu_seqlens": torch.tensor([0, 74, 73])},
    "one device": lambda a: {"beta": a["beta"].to("meta")},
    "key size of at most 256": lambda a: {"k": torch.zeros(73, 1, 320)},
    "key size of at most 128": lambda a: {"k": torch.zeros(73, 1, 256), "g": torch.zeros(73, 2, 256)},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_with_its_remedy(message: str):
    good = arguments()
    with pytest.raises(ValueError, match=message):
        chunk_transition(**good | BAD[message](good))


def test_unchecked_entries_that_do_not_exist_are_skipped(interpreted: Any):
    for operation in (chunk_transition, lambda **k: interpreted("chunk_transition", **k)):
        good = arguments() | {"entries": torch.tensor([9, 1])}
        operation(**good, check_slots=False)
        assert good["end_state"][[0, 2]].isnan().all()
        assert not good["end_state"][1].isnan().any()
