"""rerotate_scatter: against rotating from scratch, transformers' embeddings, and Triton against the specification."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid.engine.cpu import vision
from sglang_hybrid_kernels.rerotate_scatter import rerotate_scatter
from tests.kernels.tensors import randn


def frequencies(rotary: int, base: float = 10000.0) -> Tensor:
    return base ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)


def rotated(x: Tensor, positions: Tensor, inverse_frequencies: Tensor, interleaved: bool) -> Tensor:
    """x [tokens, heads, D] at its positions, by complex multiplication."""
    half = inverse_frequencies.numel()
    turn = torch.polar(torch.ones(1, dtype=torch.float64), (positions[:, None] * inverse_frequencies)[:, None])
    pairs = x[..., : 2 * half].double().unflatten(-1, (half, 2) if interleaved else (2, half))
    if not interleaved:
        pairs = pairs.mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = (turned if interleaved else turned.mT).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def index(*values: list[int]) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.int64) for value in values]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "rotary", "base"), [(16, 16, 1e4), (24, 8, 1e7), (10, 6, 500.0)])
def test_as_if_rotated_from_scratch(size: int, rotary: int, base: float, interleaved: bool):
    """Keys before rotation, cached at 3.. and 100.., wanted at 1003.. and 40.."""
    bare, inverse = randn(9, 2, size), frequencies(rotary, base)
    cached = torch.cat([torch.arange(3, 8), torch.arange(100, 104)])
    delta = torch.tensor([1000, -60])
    wanted = cached + torch.tensor([1000] * 5 + [-60] * 4)
    pool = rotated(bare, cached, inverse, interleaved)[None]
    into = torch.full((1, 12, 2, size), float("nan"), dtype=torch.float64)
    slots = index(list(range(9)), [11, 3, 4, 5, 0, 1, 2, 9, 8])
    rerotate_scatter(pool, into, *slots, delta, *index([0, 5, 9]), inverse, interleaved=interleaved)
    want = rotated(bare, wanted, inverse, interleaved)
    assert (into[0, slots[1]] - want).abs().max() < 1e-12
    assert into[0, [6, 7, 10]].isnan().all()


def test_keys_turn_as_in_transformers():
    vision.install()
    from transformers.models.gptj import modeling_gptj
    from transformers.models.qwen3_next import modeling_qwen3_next

    bare, inverse, cached, delta = randn(5, 2, 24), frequencies(8), torch.arange(7, 12), 30
    angles = [(position[:, None] * inverse).double() for position in (cached, cached + delta)]
    neox = [torch.cat([a, a], -1)[None] for a in angles]
    rotations = {
        False: lambda i: modeling_qwen3_next.apply_rotary_pos_emb(
            bare[None], bare[None], neox[i].cos(), neox[i].sin(), unsqueeze_dim=2
        )[1][0],
        True: lambda i: torch.cat(
            [
                modeling_gptj.apply_rotary_pos_emb(bare[None, ..., :8], angles[i][None].sin(), angles[i][None].cos())[
                    0
                ],
                bare[..., 8:],
            ],
            -1,
        ),
    }
    for interleaved, at in rotations.items():
        pool, into = at(0)[None], torch.zeros(1, 5, 2, 24, dtype=torch.float64)
        slots = torch.arange(5)
        rerotate_scatter(pool, into, slots, slots, *index([delta], [0, 5]), inverse, interleaved=interleaved)
        assert (into[0] - at(1)).abs().max() < 1e-12


def test_states_of_scalar_decay_turn_with_their_keys():
    """A linear layer with rotated keys and scalar decay: the state of a segment at b is R(b - a) times the one at a."""
    heads, v, k, length = 2, 6, 8, 20
    key, value, decay = randn(length, heads, k), randn(length, heads, v, seed=1), 0.97
    inverse = frequencies(k)

    def state(start: int) -> Tensor:
        turned = rotated(key, torch.arange(start, start + length), inverse, False)
        weights = decay ** torch.arange(length - 1, -1, -1, dtype=torch.float64)
        return torch.einsum("t,thv,thk->hvk", weights, value, turned)

    pool = torch.zeros(3, 2, heads, v, k, dtype=torch.float64)
    pool[1, 0], pool[1, 1] = state(11), state(11)
    flat = pool.transpose(0, 1).flatten(2, 3)  # [layers, slots, heads * V, K]
    rerotate_scatter(flat, flat, *index([1], [2], [500 - 11], [0, 1]), inverse)
    assert (flat[:, 2].unflatten(1, (heads, v)) - state(500)).abs().max() < 1e-12


def test_there_and_back_and_far_away():
    pool, inverse = randn(1, 4, 1, 64, dtype=torch.float32), frequencies(64)
    into, back = torch.zeros_like(pool), torch.zeros_like(pool)
    slots = torch.arange(4)
    for delta in (1, 12345, -(2**20)):
        rerotate_scatter(pool, into, slots, slots, *index([delta], [0, 4]), inverse)
        rerotate_scatter(into, back, slots, slots, *index([-delta], [0, 4]), inverse)
        assert (back - pool).abs().max() < 2e-6
        assert (into - pool).abs().max() > 0.1


def problem(size: int, value_size: int, rotary: int, heads: int, tokens: int, kind: torch.dtype) -> dict[str, Any]:
    """Two layers in tensors of their own, three segments, one of them empty; source and destination pools with gaps."""
    layers, slots = 2, tokens + 3
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(3))
    source, destination = order[:tokens].clone(), order.flip(0)[:tokens].clone()
    if tokens > 4:
        source[1], destination[3] = -1, -1
    third = tokens // 3
    return {
        "source_k": [randn(slots, heads, size, seed=layer, dtype=kind) for layer in range(layers)],
        "destination_k": [torch.full((slots, heads, size), float("nan"), dtype=kind) for _ in range(layers)],
        "source_v": [randn(slots, heads, value_size, seed=9 + layer, dtype=kind) for layer in range(layers)],
        "destination_v": [torch.full((slots, heads, value_size), float("nan"), dtype=kind) for _ in range(layers)],
        "source": source,
        "destination": destination,
        "delta": torch.tensor([7, 99, -100000]),
        "segment_offsets": torch.tensor([0, third, third, tokens]),
        "inverse_frequencies": frequencies(rotary, 1e6),
    }


CASES = [  # D, Dv, rotary, heads, tokens, dtype, interleaved
    (256, 256, 64, 2, 65, torch.bfloat16, False),
    (128, 128, 128, 1, 64, torch.float32, False),
    (64, 32, 48, 3, 63, torch.float16, True),
    (32, 16, 20, 1, 500, torch.float32, True),
    (16, 16, 16, 40, 1, torch.float32, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}-{case[3]}x{case[4]}-{case[5]}")
def test_triton_is_the_specification(interpreted, case):
    *shape, kind, interleaved = case
    got, want = problem(*shape, kind), problem(*shape, kind)
    interpreted("rerotate_scatter", **got, interleaved=interleaved)
    rerotate_scatter(**want, interleaved=interleaved)
    tolerance = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-8}[kind]
    written = [
        slot for slot, read in zip(want["destination"].tolist(), want["source"].tolist(), strict=True) if read >= 0
    ]
    written = [slot for slot in written if slot >= 0]
    for layer in range(2):
        k, want_k = got["destination_k"][layer], want["destination_k"][layer]
        assert torch.equal(k.isnan(), want_k.isnan())
        assert (k[written] - want_k[written]).abs().max() <= tolerance * want_k[written].abs().max()
        assert torch.equal(k[written][..., shape[2] :], want_k[written][..., shape[2] :])
        assert torch.equal(
            got["destination_v"][layer].view(torch.uint8), want["destination_v"][layer].view(torch.uint8)
        )


def test_keys_alone_in_place_in_one_pool(interpreted):
    """A pool [layers, slots, ...] of its own source and destination, slot-major memory, no values, delta 0 copies."""
    room = randn(6, 3, 2, 32, dtype=torch.float32)
    pool = room.transpose(0, 1)
    want = pool.clone()
    arguments = index([0, 1, 2], [3, 1, 4], [5, 0], [0, 2, 3])
    rerotate_scatter(want, want, *arguments, frequencies(16))
    interpreted("rerotate_scatter", pool, pool, *arguments, frequencies(16))
    assert (pool - want).abs().max() < 1e-6
    assert torch.equal(pool[:, 4], pool[:, 2])
    assert torch.equal(pool[:, [0, 2, 5]], want[:, [0, 2, 5]])


def test_values_of_any_dtype_keep_their_bits(interpreted):
    for kind in (torch.float8_e4m3fn, torch.int8, torch.bfloat16):
        arguments = problem(16, 16, 8, 2, 3, torch.float32)
        bits = torch.arange(2 * 6 * 2 * 16).to(torch.uint8).reshape(2, 6, 2, 16)
        arguments["source_v"] = list(bits.view(kind) if kind.itemsize == 1 else bits.to(kind))
        arguments["destination_v"] = [torch.zeros_like(x) for x in arguments["source_v"]]
        interpreted("rerotate_scatter", **arguments)
        for source, destination in zip(arguments["source_v"], arguments["destination_v"], strict=True):
            read, written = source[arguments["source"]], destination[arguments["destination"]]
            assert torch.equal(read.view(torch.uint8), written.view(torch.uint8))


BAD = {
    "as many tensors of each kind": {"destination_v": []},
    "one dtype, shape, strides": {"source_k": [torch.zeros(6, 1, 16), torch.zeros(7, 1, 16)]},
    "destination_k must have shape": {"destination_k": [torch.zeros(6, 1, 12)] * 2},
    "convert destination_v to one of float32": {"destination_v": [torch.zeros(6, 1, 8).half()] * 2},
    "convert source_k to .*: torch.int8": {
        "source_k": [torch.zeros(6, 1, 16, dtype=torch.int8)] * 2,
        "destination_k": [torch.zeros(6, 1, 16, dtype=torch.int8)] * 2,
    },
    "source must name slots .*: 6": {"source": torch.tensor([0, 6, 1])},
    "write each destination slot once": {"destination": torch.tensor([1, 2, 1])},
    "last dimension of source_k contiguous": {"source_k": [torch.zeros(6, 1, 32)[..., ::2]] * 2},
    "1 to 8: .9, ": {"inverse_frequencies": torch.ones(9)},
    "convert delta to": {"delta": torch.tensor([0.5, 1.0, 2.0])},
    "must end at the number of tokens, 3: 4": {"segment_offsets": torch.tensor([0, 1, 2, 4])},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_before_any_write(message: str):
    arguments = problem(16, 8, 8, 1, 3, torch.float32)
    untouched = arguments["destination_k"]
    with pytest.raises(ValueError, match=message):
        rerotate_scatter(**arguments | BAD[message])
    assert all(x.isnan().all() for x in untouched)


def test_no_slot_is_written_that_another_token_reads():
    pool = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"no slot that another token reads: \[1\]"):
        rerotate_scatter(pool, pool, *index([0, 1], [1, 2], [3], [0, 2]), frequencies(8))


def test_float64_is_for_the_naive_path(interpreted):
    pool = torch.zeros(1, 4, 1, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="naive path for fp64"):
        interpreted("rerotate_scatter", pool, pool, *index([0], [1], [3], [0, 1]), frequencies(8))
