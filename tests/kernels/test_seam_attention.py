"""seam_attention: against dense causal attention over the whole text, and Triton against the specification."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_hybrid_kernels.seam_attention import seam_attention
from tests.kernels.tensors import randn

ahead_of_time = importlib.import_module("benchmarks.kernels.compile")


def seams(length: int, width: int, every: int) -> list[int]:
    """Positions of `width` tokens at every `every`th place, and the last one."""
    return sorted(
        {p for start in range(0, length, every) for p in range(start, min(start + width, length))} | {length - 1}
    )


def problem(
    positions: list[list[int]],
    lengths: list[int],
    heads: int,
    kv_heads: int,
    size: int,
    value_size: int,
    kind: torch.dtype = torch.float64,
    page_size: int = 1,
) -> dict[str, Any]:
    """Requests of these lengths over scattered pages of a pool whose unused slots are NaN."""
    pages = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(1))[: sum(pages)]
    k = torch.full(((sum(pages) + 3) * page_size, kv_heads, size), float("nan"), dtype=kind)
    v = torch.full((k.shape[0], kv_heads, value_size), float("nan"), dtype=kind)
    used = (order[:, None] * page_size + torch.arange(page_size)).flatten()
    k[used], v[used] = (
        randn(used.numel(), kv_heads, size, dtype=kind),
        randn(used.numel(), kv_heads, value_size, seed=2, dtype=kind),
    )
    tokens = sum(len(p) for p in positions)
    return {
        "q": randn(tokens, heads, size, seed=3, dtype=kind),
        "k": k,
        "v": v,
        "pages": order,
        "page_offsets": torch.tensor([0, *pages]).cumsum(0),
        "positions": torch.tensor([p for some in positions for p in some], dtype=torch.int64),
        "query_offsets": torch.tensor([0, *(len(p) for p in positions)]).cumsum(0),
        "page_size": page_size,
    }


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("page_size", [1, 8])
def test_seam_rows_of_dense_causal_attention(page_size: int, window: int | None):
    lengths, heads, kv_heads, size = [70, 33], 6, 2, 16
    positions = [seams(70, 4, 17), seams(33, 3, 32)]
    arguments = problem(positions, lengths, heads, kv_heads, size, 24, page_size=page_size)
    got = seam_attention(**arguments, window=window, scale=0.3)
    for request, length in enumerate(lengths):
        pages = arguments["pages"][arguments["page_offsets"][request] : arguments["page_offsets"][request + 1]]
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        rows = slice(*arguments["query_offsets"][request : request + 2].tolist())
        q = torch.zeros(length, heads, size, dtype=torch.float64)
        q[positions[request]] = arguments["q"][rows]
        near = torch.ones(length, length, dtype=torch.bool).tril()
        if window is not None:
            near = near.triu(1 - window)
        dense = F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q, arguments["k"][slots], arguments["v"][slots])),
            attn_mask=near,
            scale=0.3,
            enable_gqa=True,
        ).transpose(0, 1)
        assert (got[rows] - dense[positions[request]]).abs().max() < 1e-12


def test_what_sees_nothing_is_zero():
    arguments = problem([[-1, 3], [], [-1]], [4, 5, 0], 2, 1, 16, 16)
    got = seam_attention(**arguments)
    assert not got[[0, 2]].any()
    assert got[1].any()


CASES = [  # positions, lengths, heads, kv_heads, D, Dv, dtype, page_size, window
    ([seams(500, 8, 128), [], [0]], [500, 7, 1], 8, 1, 64, 64, torch.float32, 1, None),
    ([[64, 3, -1, 63, 65, 62]], [66], 1, 1, 128, 128, torch.float32, 1, None),
    ([seams(65, 5, 30), seams(64, 9, 16), seams(63, 2, 9)], [65, 64, 63], 16, 2, 256, 256, torch.bfloat16, 1, None),
    ([seams(300, 4, 100), seams(40, 4, 20)], [300, 40], 6, 2, 80, 48, torch.float32, 16, None),
    ([seams(500, 4, 125), [-1, -1]], [500, 3], 4, 4, 32, 32, torch.float16, 1, 16),
    ([[2100, 5, 2047, 2048], [4095], [30, -1]], [2101, 4096, 31], 2, 1, 32, 64, torch.float32, 1, None),
    ([[2300, 150, 2299], [30]], [2301, 31], 3, 1, 32, 32, torch.float32, 1, 300),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[2]}of{case[3]}-{case[4]}-{case[6]}-window{case[8]}")
def test_triton_is_the_specification(interpreted, case):
    *shape, window = case
    arguments = problem(*shape)
    want = seam_attention(**arguments, window=window)
    got = interpreted("seam_attention", **arguments, window=window)
    assert got.dtype == want.dtype
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[arguments["q"].dtype]
    assert (got - want).abs().max() <= tolerance * want.abs().max()
    assert not got[arguments["positions"] < 0].any()


def test_a_query_has_the_same_bits_in_any_company(interpreted):
    """With other seams and requests, in another order, and as one part or joined from parts."""
    crowd = problem([seams(2100, 8, 300), [40, 30]], [2100, 41], 4, 2, 32, 32, torch.float32)
    alone = {
        **crowd,
        "q": crowd["q"][[3, 56]],
        "positions": crowd["positions"][[3, 56]],
        "page_offsets": crowd["page_offsets"][:2],
        "query_offsets": torch.tensor([0, 2]),
    }
    alone["pages"] = crowd["pages"][:2100]
    assert alone["positions"].tolist() == [3, 2099]
    together, apart = interpreted("seam_attention", **crowd), interpreted("seam_attention", **alone)
    assert torch.equal(together[[3, 56]], apart)
    bounded = dict(alone, q=alone["q"][:1], positions=alone["positions"][:1], query_offsets=torch.tensor([0, 1]))
    bounded |= {"pages": crowd["pages"][:10], "page_offsets": torch.tensor([0, 10]), "longest": 10}
    assert torch.equal(interpreted("seam_attention", **bounded), apart[:1])


def test_what_waits_to_be_joined_is_bounded_and_changes_no_bit(interpreted):
    """Queries are taken in turns, a turn may begin inside a request and hold several."""
    given = problem([[7, 2099, 2048], [], [30], [2049]], [2100, 9, 31, 2050], 2, 1, 16, 16, torch.float32)
    want = interpreted("seam_attention", **given)
    interpreted("seam_attention.triton:__setattr__", "MOST_PARTIAL", 2 * 3 * 2 * 16)  # two queries, over three parts
    try:
        assert torch.equal(interpreted("seam_attention", **given), want)
    finally:
        interpreted("seam_attention.triton:__setattr__", "MOST_PARTIAL", 1 << 26)


def test_many_queries_over_a_long_text_need_little_memory():
    """All at once would take 4 GiB here, and offsets of more than 31 bits in four times as many queries."""
    tokens, heads, size, keys = 2048, 16, 256, 262_144
    largest = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.empty.memory_format:
                largest.append(made.nbytes)
            return made

    pool, bounds = torch.zeros(1, 2, size, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    q, positions = torch.zeros(tokens, heads, size, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int64)
    ends = torch.tensor([0, tokens])
    with ahead_of_time.compiling_for(90) as launches, Sizes():
        seam_attention(q, pool, pool, bounds[:1], bounds, positions, ends, longest=keys, check_slots=False)
    assert {name for name, *_ in launches} == {"attend_kernel", "join_kernel"}
    assert max(largest) <= 1 << 28


BAD = {
    "kv heads must divide 3 query heads: 2": {"q": torch.zeros(2, 3, 16)},
    "k must have shape": {"k": torch.zeros(5, 2, 8)},
    "convert v to one of float32": {"v": torch.zeros(5, 2, 16).half()},
    "convert q to .*: torch.int8": {"q": torch.zeros(2, 4, 16, dtype=torch.int8)},
    "last dimension of k contiguous": {"k": torch.zeros(5, 2, 32)[..., ::2]},
    "page_size must divide .* 5 slots: 2": {"page_size": 2},
    "window must be positive, or None: 0": {"window": 0},
    "longest must bound .*: 4": {"longest": 3},
    r"pages must lie in 0\.\.4: 5": {"pages": torch.tensor([0, 1, 5, 2])},
    r"positions must lie below .*: \[4\]": {"positions": torch.tensor([3, 4])},
    "positions must have shape": {"positions": torch.tensor([3])},
    "must end at the number of tokens, 2: 1": {"query_offsets": torch.tensor([0, 1])},
    "must not be negative": {"page_offsets": torch.tensor([0, 5, 4]), "query_offsets": torch.tensor([0, 1, 2])},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message: str):
    arguments = {
        "q": torch.zeros(2, 4, 16),
        "k": torch.zeros(5, 2, 16),
        "v": torch.zeros(5, 2, 16),
        "pages": torch.tensor([0, 1, 3, 2]),
        "page_offsets": torch.tensor([0, 4]),
        "positions": torch.tensor([3, 1]),
        "query_offsets": torch.tensor([0, 2]),
    }
    with pytest.raises(ValueError, match=message):
        seam_attention(**arguments | BAD[message])


def test_what_only_the_naive_path_computes_is_refused(interpreted):
    with pytest.raises(ValueError, match="naive path for fp64"):
        interpreted("seam_attention", **problem([[0]], [1], 1, 1, 16, 16))
    with pytest.raises(ValueError, match="up to 256 dimensions: 288"):
        interpreted("seam_attention", **problem([[0]], [1], 1, 1, 288, 16, torch.float32))
