"""conv_window_at: against plain indexing, SGLang's stored windows, and Triton against naive."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid_kernels.conv_window_at import conv_window_at
from tests.kernels.calls import randn

LENGTHS = [0, 5, 1, 300, 0, 2]
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)
WANTED = [(1, 0, 0), (1, 1, 7), (1, 5, 2), (3, 299, 3), (3, 2, -1), (2, 1, 4), (4, 0, 5), (5, 2, 6)]
"""(sequence, position, slot): before the first token, inside the first width - 1, at ends, of empty sequences."""


def ask(wanted: list[tuple[int, int, int]]) -> dict[str, Tensor]:
    sequence, position, slots = (torch.tensor(column) for column in zip(*wanted, strict=True))
    return {"cu_seqlens": CU_SEQLENS, "sequence": sequence, "position": position, "slots": slots}


def expected_window(x: Tensor, before: Tensor, sequence: int, position: int) -> Tensor:
    lo = int(CU_SEQLENS[sequence])
    return torch.cat([before, x[lo : lo + position].mT], 1)[:, -before.shape[1] :]


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("window", [1, 3])
def test_windows_are_the_last_inputs(interpreted: Any, backend: str, window: int):
    call = conv_window_at if backend == "naive" else lambda *a, **k: interpreted("conv_window_at", *a, **k)
    x, initial = randn(sum(LENGTHS), 300), randn(4, 300, window, seed=1)
    starts = torch.tensor([0, 3, -1, 2, 1, 0])
    into = torch.full((9, 300, window), torch.nan)
    call(x, into=into, initial=initial, initial_slots=starts, **ask(WANTED))
    for sequence, position, slot in WANTED:
        start = int(starts[sequence])
        before = initial[start] if start >= 0 else torch.zeros(300, window)
        if slot >= 0:
            assert torch.equal(into[slot], expected_window(x, before, sequence, position)), (sequence, position)
    assert into[[1, 8]].isnan().all()


def test_triton_reads_channels_first_and_rounds(interpreted: Any):
    x = randn(40, sum(LENGTHS)).mT
    into = torch.full((9, 3, 40), torch.nan, dtype=torch.bfloat16).mT
    expected = into.clone()
    conv_window_at(x, into=expected, **ask(WANTED))
    interpreted("conv_window_at", x, into=into, **ask(WANTED))
    assert torch.equal(expected[3], expected_window(x, torch.zeros(40, 3), 3, 299).bfloat16())
    torch.testing.assert_close(into, expected, rtol=0, atol=0, equal_nan=True)


def test_within_one_pool_as_the_convolution_leaves_it():
    from sglang_hybrid.engine.cpu.causal_conv import causal_conv1d_fn

    pool, weight = randn(4, 12, 3, seed=2), randn(12, 4, seed=3)
    x = randn(12, 30)
    before = pool.clone()
    one = {"cu_seqlens": torch.tensor([0, 30]), "sequence": torch.tensor([0])}
    conv_window_at(x.mT, **one, position=torch.tensor([17]), into=pool, slots=torch.tensor([3]), initial=pool,
                   initial_slots=torch.tensor([1]))  # fmt: skip
    index, resume = torch.tensor([1]), torch.tensor([True])
    causal_conv1d_fn(
        x[:, :17], weight, None, before, torch.tensor([0, 17]), cache_indices=index, has_initial_state=resume
    )
    assert torch.equal(pool[3], before[1])


X, INTO = torch.zeros(10, 6), torch.zeros(4, 6, 3)
GOOD: dict[str, Any] = {
    "x": X, "cu_seqlens": torch.tensor([0, 10]), "sequence": torch.tensor([0]), "position": torch.tensor([4]),
    "into": INTO, "slots": torch.tensor([1]),
}  # fmt: skip
BAD = {
    r"x must have shape": {"x": X[0]},
    r"into must have shape \[any, 6, any\]": {"into": INTO[:, :5]},
    r"fewer than 16 inputs": {"into": torch.zeros(4, 6, 16)},
    r"convert x to one of": {"x": X.to(torch.int32)},
    r"initial and initial_slots together": {"initial": INTO},
    r"initial must have shape": {"initial": INTO[..., :2], "initial_slots": torch.tensor([0])},
    r"initial_slots must have shape \[1\]": {"initial": INTO, "initial_slots": torch.tensor([0, 1])},
    r"initial_slots must name slots": {"initial": INTO, "initial_slots": torch.tensor([4])},
    r"slots must name slots of the pool": {"slots": torch.tensor([4])},
    r"sequence must be 0 to 0: 1": {"sequence": torch.tensor([1])},
    r"position must lie in its sequence, 0 to 10: 11": {"position": torch.tensor([11])},
    r"position must have shape": {"position": torch.tensor(3)},
    r"cu_seqlens must end at the number of tokens": {"cu_seqlens": torch.tensor([0, 9])},
    r"no sequence asked for starts from": {"initial": INTO, "initial_slots": torch.tensor([1])},
    r"one device": {"x": X.to("meta")},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_with_its_remedy(message: str):
    with pytest.raises(ValueError, match=message):
        conv_window_at(**GOOD | BAD[message])


def test_a_slot_named_twice_is_refused():
    twice = {name: torch.tensor([0, 1]) for name in ("position",)} | {
        name: torch.tensor([0, 0]) for name in ("sequence", "slots")
    }
    with pytest.raises(ValueError, match="name each slot once"):
        conv_window_at(**GOOD | twice)
