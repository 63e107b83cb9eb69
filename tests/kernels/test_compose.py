"""compose: against token-by-token recurrences in float64, against itself, and Triton against the specification."""

import itertools

import pytest
import torch
from torch import Tensor

from sglang_hybrid.engine.cpu import vision
from sglang_hybrid_kernels.chunk_transition import chunk_transition
from sglang_hybrid_kernels.compose import compose, naive
from tests.kernels import recurrences
from tests.kernels.recurrences import recurrence
from tests.kernels.tensors import randn

FAMILIES = ("mamba2", "gla", "gdn", "kda")


def tokens(family: str, length: int, heads: int, v: int, k: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Random k, v, log decay (per head, or per channel) and beta of one sequence, in float64."""
    key = torch.nn.functional.normalize(randn(length, heads, k, seed=seed), dim=-1)
    decay = -0.1 * randn(length, heads, k, seed=seed + 1).abs()
    if family in ("mamba2", "gdn"):
        decay = decay[..., :1]
    return key, randn(length, heads, v, seed=seed + 2), decay, torch.sigmoid(randn(length, heads, seed=seed + 3))


def entry(family: str, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """(T_C as stored, S_C) of a segment: from the identity with no input, and from zero."""
    heads, k, v = key.shape[1], key.shape[2], value.shape[2]
    end_state = recurrence(family, torch.zeros(heads, v, k, dtype=key.dtype), key, value, decay, beta)
    if family == "mamba2":
        return decay.sum(0).squeeze(-1).exp(), end_state
    if family == "gla":
        return decay.sum(0).exp(), end_state
    nothing = torch.zeros(*key.shape, dtype=key.dtype)
    return recurrence(family, torch.eye(k, dtype=key.dtype).repeat(heads, 1, 1), key, nothing, decay, beta), end_state


def rows(*values: list[int]) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.int64) for value in values]


WAYS = [*((family, 1) for family in FAMILIES), ("gdn", 2), ("kda", 3), ("gdn", 7)]


@pytest.mark.parametrize(("family", "tree_groups"), WAYS)
def test_chain_of_segments_is_the_whole_text(family: str, tree_groups: int):
    heads, v, k, cuts = 2, 12, 8, [0, 30, 31, 80, 80, 150]
    text = tokens(family, 150, heads, v, k)
    entries = [entry(family, *(x[a:b] for x in text)) for a, b in itertools.pairwise(cuts)]
    transition, end_state = (torch.stack(x)[None] for x in zip(*entries, strict=True))
    pool = randn(1, 3, heads, v, k, seed=9)
    expected = recurrence(family, pool[0, 2], *text)
    compose(pool, *rows([2], [1], [0, 1, 2, 3, 4], [0, 5]), transition, end_state, tree_groups=tree_groups)
    assert (pool[0, 1] - expected).abs().max() < 1e-13


def test_gdn_chain_is_the_transformers_recurrence():
    vision.install()
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    heads, v, k = 2, 16, 16
    key, value, decay, beta = tokens("gdn", 90, heads, v, k)
    entries = [entry("gdn", key[s], value[s], decay[s], beta[s]) for s in (slice(0, 40), slice(40, 90))]
    transition, end_state = (torch.stack(x)[None] for x in zip(*entries, strict=True))
    pool = torch.zeros(1, 1, heads, v, k, dtype=torch.float64)
    compose(pool, *rows([-1], [0], [0, 1], [0, 2]), transition, end_state)
    batch = [x[None].float() for x in (key, key, value, decay.squeeze(-1), beta)]
    _, state = hf.torch_recurrent_gated_delta_rule(*batch, initial_state=None, output_final_state=True)
    assert (pool[0, 0].transpose(-1, -2) - state[0]).abs().max() < 2e-6


STORAGE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.int8: 2e-2}


@pytest.mark.parametrize("kind", STORAGE)
@pytest.mark.parametrize("family", FAMILIES)
def test_segments_that_were_prefilled_apart_join_to_the_text(interpreted, family: str, kind: torch.dtype):
    """chunk_transition writes the entries, compose carries a state over them: both on Triton, all storage types."""
    lengths, heads, d = [70, 1, 64, 33], 2, 32
    some = recurrences.tokens(family, lengths, heads, heads if family in ("kda", "gla") else 1, d, d)
    narrow, dense = some.to(torch.float32), some.delta
    tail = (d, d) if dense else (d,) if family == "gla" else ()
    stored = {"end_state": torch.zeros(6, heads, d, d, dtype=kind)}
    stored["transition"] = torch.zeros(6, heads, *tail, dtype=kind if dense else torch.float32)
    scales = {f"{name}_scale": torch.zeros(6, heads, d) for name, x in stored.items() if x.dtype is torch.int8}
    vanishing = torch.zeros(6, heads, dtype=torch.bool)
    entries = torch.tensor([4, 0, 5, 2])
    packed = {name: getattr(narrow, name) for name in ("k", "v", "g", "beta", "cu_seqlens", "delta")}
    interpreted("chunk_transition", **packed, entries=entries, **stored, **scales, vanishing=vanishing)
    pool = randn(1, 1, heads, d, d, seed=3)
    text = some.cut((0, sum(lengths)))
    want = recurrences.run(text, 0, pool[0, 0])[-1]
    got = pool.float()
    one_layer = {name: x[None] for name, x in (stored | scales).items()}
    if dense:
        cells = torch.arange(vanishing.numel()).view_as(vanishing)
        one_layer |= {name: x[0].flatten(0, 1) for name, x in one_layer.items() if name.startswith("transition")}
        one_layer["transition_rows"] = cells.masked_fill(vanishing, -1)[None]
    chain = (*rows([0], [0]), entries, *rows([0, 4]))
    interpreted("compose", got, *chain, **one_layer)
    assert (got[0, 0] - want).abs().max() < STORAGE[kind] * want.abs().max()
    exact = {name: torch.zeros(1, 6, heads, *x.shape[2:], dtype=torch.float64) for name, x in stored.items()}
    wide = {name: getattr(some, name) for name in packed}
    chunk_transition(**wide, entries=entries, **{name: x[0] for name, x in exact.items()})
    compose(pool, *chain, **exact)
    assert (pool[0, 0] - want).abs().max() < 1e-13 * want.abs().max()


def test_joining_operators_is_associative():
    a, b, c = ((randn(1, 2, 8, 8, seed=s) / 3, randn(1, 2, 5, 8, seed=s + 1)) for s in (0, 2, 4))
    left, right = naive.joined(naive.joined(a, b), c), naive.joined(a, naive.joined(b, c))
    for x, y in zip(left, right, strict=True):
        assert (x - y).abs().max() < 1e-14


def test_parts_cover_the_chain_in_order():
    for length in range(9):
        for groups in range(1, 6):
            items = [i for part in naive.parts_of(length, groups) for i in range(length)[part]]
            assert items == list(range(length))


def stored(family: str, kind: torch.dtype, layers: int, entries: int, heads: int, v: int, k: int) -> dict[str, Tensor]:
    """Random operators in their storage type, with scales for int8."""
    shape = {"dense": (k, k), "diagonal": (k,), "scalar": ()}[family]
    transition = randn(layers, entries, heads, *shape, dtype=torch.float32)
    transition = transition / k**0.5 if family == "dense" else transition.sigmoid()
    made: dict[str, Tensor] = {}
    named = {"transition": transition, "end_state": randn(layers, entries, heads, v, k, seed=1, dtype=torch.float32)}
    for name, tensor in named.items():
        if kind is torch.int8 and tensor.ndim > 3:
            matrix = tensor if tensor.ndim == 5 else tensor[..., None, :]
            scale = matrix.abs().amax(-2) / 127
            made[f"{name}_scale"] = scale
            made[name] = (matrix / scale[..., None, :]).round().to(torch.int8).reshape(tensor.shape)
        else:
            made[name] = tensor if kind is torch.int8 else tensor.to(kind)
    return made


CASES = [  # family, storage, pool, layers, heads, V, K, tree_groups
    ("dense", torch.float32, torch.float32, 2, 3, 64, 64, 1),
    ("dense", torch.bfloat16, torch.float32, 1, 1, 128, 128, 1),
    ("dense", torch.int8, torch.bfloat16, 2, 2, 64, 64, 1),
    ("dense", torch.float32, torch.float32, 1, 2, 128, 128, 3),
    ("dense", torch.int8, torch.float32, 2, 1, 80, 64, 2),
    ("diagonal", torch.bfloat16, torch.float32, 1, 5, 64, 128, 1),
    ("diagonal", torch.int8, torch.float32, 1, 2, 128, 64, 1),
    ("scalar", torch.float32, torch.bfloat16, 3, 4, 64, 128, 1),
    ("scalar", torch.int8, torch.float32, 1, 16, 80, 16, 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[5]}x{case[6]}-tree{case[7]}")
def test_triton_is_the_specification(interpreted, case):
    family, kind, state_type, layers, heads, v, k, groups = case
    operators = stored(family, kind, layers, 5, heads, v, k)
    room = torch.full((7, layers, heads, v, k), float("nan"), dtype=state_type)
    pool = room.transpose(0, 1)  # slot-major memory, as a page-major pool has it
    pool[:, :3] = randn(layers, 3, heads, v, k, seed=5).to(state_type)
    want, got = pool.clone(), room.clone().transpose(0, 1)
    args = rows([0, -1, 1, 2, 2], [3, 4, 1, -1, 6], [4, 0, 2, 2, 1, 3, 0], [0, 4, 4, 6, 7, 7])
    transition, end_state = operators.pop("transition"), operators.pop("end_state")
    compose(want, *args, transition, end_state, tree_groups=groups, **operators)
    interpreted("compose", got, *args, transition, end_state, tree_groups=groups, **operators)
    assert got[:, [1, 3, 4, 6]].isfinite().all()
    assert got[:, 5].isnan().all()
    assert torch.equal(got[:, 6], got[:, 2])  # an empty chain copies
    assert not got[:, 4].any()  # an empty chain from nothing is nothing
    # a state's two halves carry 17 of fp32's 24 bits
    tolerance = 2**-8 if state_type is torch.bfloat16 else 1e-5
    written = [0, 1, 2, 3, 4, 6]
    assert (got[:, written] - want[:, written]).abs().max() <= tolerance * want[:, written].abs().max()


def test_a_bfloat16_state_is_rounded_once(interpreted):
    operators = stored("dense", torch.float32, 1, 8, 1, 32, 32)
    tensors = operators["transition"], operators["end_state"]
    args = rows([0], [1], list(range(8)), [0, 8])
    reference = randn(1, 2, 1, 32, 32, seed=3, dtype=torch.float32).bfloat16().float()
    states = [reference.bfloat16() for _ in range(3)]
    compose(reference, *args, *tensors)
    compose(states[0], *args, *tensors)
    interpreted("compose", states[1], *args, *tensors)
    for entry in range(8):  # rounded after every segment
        compose(states[2], *rows([min(entry, 1)], [1], [entry], [0, 1]), *tensors)
    once, once_on_triton, often = ((x[:, 1].float() - reference[:, 1]).square().mean().sqrt() for x in states)
    assert once_on_triton < 1.01 * once
    assert once < 2**-9 * reference[:, 1].square().mean().sqrt()
    assert often > 1.5 * once


@pytest.mark.parametrize("groups", [1, 3])
def test_a_row_has_the_same_bits_alone_and_in_company(interpreted, groups: int):
    operators = stored("dense", torch.float32, 1, 5, 2, 64, 64)
    tensors = (operators["transition"], operators["end_state"])
    alone = randn(1, 8, 2, 64, 64, dtype=torch.float32)
    company = alone.clone()
    interpreted("compose", alone, *rows([0], [5], [3, 1, 4, 4], [0, 4]), *tensors, tree_groups=groups)
    many = rows([2, 0, -1], [6, 5, 7], [1, 2, 3, 1, 4, 4, 0], [0, 2, 6, 7])
    interpreted("compose", company, *many, *tensors, tree_groups=groups)
    assert torch.equal(alone[:, 5], company[:, 5])


def test_vanishing_transitions_are_not_read(interpreted):
    operators = stored("dense", torch.bfloat16, 1, 3, 2, 64, 64)
    matrices = operators["transition"].flatten(0, 2)
    matrices[[2, 5]] = float("nan")  # as are row -1 and what an entry's own row would be
    transition_rows = torch.tensor([[[4, 1], [-1, 3], [0, 4]]])
    pool = randn(1, 3, 2, 64, 64, dtype=torch.float32)
    pool[:, 2] = float("nan")
    want = pool.clone()
    args = (*rows([0, 1], [2, 1], [0, 1, 1], [0, 2, 3]), matrices, operators["end_state"])
    interpreted("compose", pool, *args, transition_rows=transition_rows)
    compose(want, *args, transition_rows=transition_rows)
    assert pool.isfinite().all()
    assert torch.equal(pool[0, 1, 0], operators["end_state"][0, 1, 0].float())
    assert (pool - want).abs().max() < 1e-5 * want.abs().max()


def good() -> dict[str, Tensor | None]:
    source, destination, chain, chain_offsets = rows([0, 1], [2, 1], [0, 1], [0, 1, 2])
    return {
        "pool": torch.zeros(1, 3, 2, 16, 16),
        "source": source,
        "destination": destination,
        "chain": chain,
        "chain_offsets": chain_offsets,
        "transition": torch.zeros(1, 2, 2, 16, 16),
        "end_state": torch.zeros(1, 2, 2, 16, 16),
    }


BAD = {
    "convert pool to .*: torch.float16": {"pool": torch.zeros(1, 3, 2, 16, 16, dtype=torch.float16)},
    "dimensions of pool contiguous": {"pool": torch.zeros(1, 3, 2, 16, 16).transpose(-1, -2)},
    "source must name slots .* 0 to 2, .*: 3": {"source": torch.tensor([3, 1])},
    "destination must have shape": {"destination": torch.tensor([1])},
    "chain must name segment entries, 0 to 1: 2": {"chain": torch.tensor([2, 0])},
    "chain must name segment entries, 0 to 1: -1": {"chain": torch.tensor([1, -1])},
    "must not be negative": {"chain_offsets": torch.tensor([0, 3, 2])},
    "convert chain to .*int64: torch.float32": {"chain": torch.zeros(2)},
    "from one row only": {"destination": torch.tensor([1, 1])},
    "another row overwrites.*: 1": {"source": torch.tensor([1, 1])},
    "transition must have shape": {"transition": torch.zeros(1, 2, 2, 16, 8)},
    "end_state must have shape": {"end_state": torch.zeros(1, 2, 2, 8, 16)},
    "dimensions of transition contiguous": {"transition": torch.zeros(1, 2, 2, 16, 16).transpose(-1, -2)},
    "transition_scale exactly when": {"transition": torch.zeros(1, 2, 2, 16, 16, dtype=torch.int8)},
    "convert transition to .*: torch.float16": {"transition": torch.zeros(1, 2, 2, 16, 16, dtype=torch.float16)},
    "store a scalar transition": {
        "transition": torch.zeros(1, 2, 2, dtype=torch.int8),
        "transition_scale": torch.zeros(1, 2, 2),
    },
    "tree_groups to 1, .*: 0": {"tree_groups": 0},
    "for dense transitions only: 2": {"tree_groups": 2, "transition": torch.zeros(1, 2, 2)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_before_any_write(message: str):
    arguments = good() | BAD[message]
    before = arguments["pool"].clone()
    with pytest.raises(ValueError, match=message):
        compose(**arguments)
    assert torch.equal(arguments["pool"], before)


def test_what_only_the_naive_path_computes_is_refused(interpreted):
    wide = {name: x.double() if x.is_floating_point() else x for name, x in good().items()}
    compose(**wide)
    with pytest.raises(ValueError, match="naive path for fp64"):
        interpreted("compose", **wide)
    odd = good() | {"pool": torch.zeros(1, 3, 2, 16, 24), "end_state": torch.zeros(1, 2, 2, 16, 24)}
    odd["transition"] = torch.zeros(1, 2, 2, 24, 24)
    with pytest.raises(ValueError, match=r"power of two in 16\.\.128: 24"):
        interpreted("compose", **odd)
