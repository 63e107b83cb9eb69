"""state_verify, promote_path: against every path replayed alone, transformers, and Triton against the specification."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid.engine.cpu import vision
from sglang_hybrid_kernels.state_verify import promote_path, promote_window, state_verify
from sglang_hybrid_kernels.state_verify.naive import path
from tests.kernels.tensors import randn


def random_tree(nodes: int, seed: int, gaps: bool = False) -> list[int]:
    """Parents before children, several children of the committed state; with gaps, places without a node."""
    generator, parents, real = torch.Generator().manual_seed(seed), [], [-1]
    for node in range(nodes):
        if gaps and node % 5 == 3:
            parents.append(-2)
            continue
        parents.append(real[int(torch.randint(len(real), (1,), generator=generator))])
        real.append(node)
    return parents


CHAIN = [-1, 0, 1, 2, 3, 4]
FORK = [-1, -1, 0, 0, 1, 2, 2, -2, 4, 5]


def problem(
    delta: bool, parents: list[list[int]], key_heads: int, heads: int, v: int, k: int, kind: torch.dtype = torch.float64
) -> dict[str, Any]:
    requests, nodes = len(parents), len(parents[0])
    key, query = (randn(requests, nodes, key_heads, k, seed=s) for s in (1, 2))
    parent = torch.tensor(parents).reshape(requests, nodes)
    made = {
        "q": torch.nn.functional.normalize(query, dim=-1).to(kind),
        "k": torch.nn.functional.normalize(key, dim=-1).to(kind),
        "v": randn(requests, nodes, heads, v, seed=3).to(kind),
        "g": -0.3 * randn(requests, nodes, heads, seed=4).abs(),
        "beta": torch.sigmoid(randn(requests, nodes, heads, seed=5)) if delta else None,
        "pool": randn(requests + 3, heads, v, k, seed=6),
    }
    for name, x in made.items():
        if x is not None and kind is not torch.float64 and name in ("g", "beta", "pool"):
            made[name] = x.float()
        if x is not None and name != "pool":
            made[name][parent == -2] = float("nan")
    slots = torch.arange(requests).flip(0) + 1
    if requests > 2:
        slots[1] = -1
    return {**made, "slots": slots, "parent": parent, "scale": 0.7}


def replayed(arguments: dict[str, Any], request: int, node: int) -> tuple[Tensor, Tensor]:
    """(out, state) of one candidate: its path alone, token by token from the committed state."""
    slot, pool = int(arguments["slots"][request]), arguments["pool"]
    state = pool[slot].clone() if slot >= 0 else torch.zeros_like(pool[0])
    repeat = pool.shape[1] // arguments["k"].shape[2]
    for at in path(arguments["parent"][request].tolist(), node):
        k = arguments["k"][request, at].repeat_interleave(repeat, 0)
        value = arguments["v"][request, at]
        state = state * arguments["g"][request, at].exp()[:, None, None]
        if arguments["beta"] is not None:
            value = arguments["beta"][request, at][:, None] * (value - (state @ k[..., None]).squeeze(-1))
        state = state + value[..., None] * k[:, None]
    q = arguments["q"][request, node].repeat_interleave(repeat, 0)
    return arguments["scale"] * (state @ q[..., None]).squeeze(-1), state


def promoted(arguments: dict[str, Any], values: Tensor, accepted: list[int], run: Any = promote_path) -> Tensor:
    """The pool after promotion in place, as one layer of it."""
    pool, slots = arguments["pool"][None].clone(), arguments["slots"]
    one_layer = (arguments["k"][None], values[None], arguments["g"][None])
    run(pool, slots, slots.clone(), *one_layer, arguments["parent"], torch.tensor(accepted))
    return pool[0]


@pytest.mark.parametrize("delta", [True, False], ids=["gdn", "mamba2"])
@pytest.mark.parametrize("parents", [[CHAIN], [FORK, random_tree(10, 1), random_tree(10, 2, gaps=True)]])
def test_every_candidate_is_its_path_alone(delta: bool, parents: list[list[int]]):
    arguments = problem(delta, parents, 2, 4, 6, 8)
    before = arguments["pool"].clone()
    out, values = state_verify(**arguments)
    assert torch.equal(arguments["pool"], before)
    for request, tree in enumerate(parents):
        for node, parent in enumerate(tree):
            if parent == -2:
                assert not out[request, node].any()
                assert not values[request, node].any()
                continue
            want, state = replayed(arguments, request, node)
            assert (out[request, node] - want).abs().max() < 1e-13
            accepted = [-1] * len(parents)
            accepted[request] = node
            slot = int(arguments["slots"][request])
            if slot >= 0:
                assert (promoted(arguments, values, accepted)[slot] - state).abs().max() < 1e-13


def test_a_chain_is_the_transformers_recurrence():
    vision.install()
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    arguments = problem(True, [CHAIN], 2, 2, 8, 8)
    arguments["scale"] = 8**-0.5
    out, values = state_verify(**arguments)
    batch = [arguments[name].float() for name in ("q", "k", "v", "g", "beta")]
    state = arguments["pool"][arguments["slots"]].mT.float()
    want, want_state = hf.torch_recurrent_gated_delta_rule(*batch, initial_state=state, output_final_state=True)
    assert (out - want).abs().max() < 1e-6
    final = promoted(arguments, values, [len(CHAIN) - 1])[arguments["slots"]]
    assert (final.mT - want_state).abs().max() < 1e-6


CASES = [  # delta, trees, key_heads, heads, V, K, token dtype, pool dtype
    (True, [[-1], [-1], [-2]], 1, 1, 64, 64, torch.float32, torch.float32),
    (True, [FORK, random_tree(10, 3, gaps=True), random_tree(10, 4)], 2, 4, 128, 128, torch.bfloat16, torch.float32),
    (True, [random_tree(63, 5, gaps=True)], 1, 2, 64, 64, torch.float32, torch.bfloat16),
    (True, [list(range(-1, 63))], 1, 1, 32, 32, torch.float32, torch.float32),
    (False, [random_tree(17, 6), FORK + [-2] * 7], 1, 2, 80, 128, torch.float32, torch.float32),
    (False, [FORK], 1, 16, 64, 16, torch.float16, torch.float32),
]
NAMES = [f"{'gdn' if case[0] else 'mamba2'}-{len(case[1][0])}nodes-{case[3]}x{case[4]}x{case[5]}" for case in CASES]
LOOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_triton_is_the_specification(interpreted, case):
    *shape, kind, pool_kind = case
    arguments = problem(*shape, kind)
    room = torch.full((arguments["pool"].shape[0], 2, *arguments["pool"].shape[1:]), float("nan"), dtype=pool_kind)
    room[:, 1] = arguments["pool"]
    arguments["pool"] = room[:, 1]  # a slot's pitch spans other layers
    before = arguments["pool"].clone()
    want, want_values = state_verify(**arguments)
    out, values = interpreted("state_verify", **arguments)
    assert torch.equal(arguments["pool"], before)
    assert (out - want).abs().max() <= LOOSE[kind] * want.abs().max()
    assert values.dtype == torch.float32
    assert (values - want_values).abs().max() <= 1e-5 * want_values.abs().max()
    assert not out[arguments["parent"] == -2].any()
    assert not values[arguments["parent"] == -2].any()

    last = [max((n for n, p in enumerate(tree) if p != -2), default=-1) for tree in shape[1]]
    run = lambda *args: interpreted("state_verify:promote_path", *args)  # noqa: E731
    got, want_pool = promoted(arguments, values, last, run), promoted(arguments, values, last)
    tolerance = 2**-8 if pool_kind is torch.bfloat16 else 1e-5
    assert (got - want_pool).abs().max() <= tolerance * want_pool.abs().max()


def test_promotion_over_layers_and_slots(interpreted):
    """All layers in one launch, into other slots; nothing accepted copies the state, -1 writes nothing."""
    layers, trees = 3, [FORK, FORK, FORK, FORK]
    each = [problem(True, trees, 1, 2, 32, 32, torch.float32) for _ in range(layers)]
    for layer, arguments in enumerate(each):
        arguments["v"] = arguments["v"] * (layer + 1)
    values = torch.stack([state_verify(**arguments)[1] for arguments in each])
    k, g = (torch.stack([arguments[name] for arguments in each]) for name in ("k", "g"))
    room = torch.full((9, layers, 2, 32, 32), float("nan"))
    room[:4] = randn(4, layers, 2, 32, 32, dtype=torch.float32)
    pool, want = room.transpose(0, 1), room.clone().transpose(0, 1)
    rows = [torch.tensor(x) for x in ([0, 1, -1, 3], [6, 1, 8, -1])]
    tail = (k, values, g, each[0]["parent"], torch.tensor([9, -1, 5, 3]))
    untouched = want.clone()
    promote_path(want, *rows, *tail)
    interpreted("state_verify:promote_path", pool, *rows, *tail)
    assert (pool[:, [6, 8]] - want[:, [6, 8]]).abs().max() < 1e-5
    assert torch.equal(pool[:, :4], untouched[:, :4])
    assert pool[:, [4, 5, 7]].isnan().all()
    assert not torch.equal(pool[0, 6], pool[1, 6])


@pytest.mark.parametrize("width", [1, 3, 5])
def test_windows_after_the_accepted_path(interpreted, width: int):
    """Paths shorter and longer than the window; in place, to another slot, from nothing, nothing accepted, skipped."""
    layers, channels, trees = 2, 37, [CHAIN, CHAIN, FORK[:6], FORK[:6], FORK[:6]]
    parent, accepted = torch.tensor(trees), [5, 0, 5, -1, 2]
    rows = [torch.tensor(x) for x in ([0, 1, -1, 3, 2], [0, 4, 5, 6, -1])]
    inputs = randn(layers, 5, 6, channels, dtype=torch.float32).bfloat16()
    room = torch.full((8, layers, width, channels), float("nan"), dtype=torch.bfloat16)
    room[:4] = randn(4, layers, width, channels, seed=1, dtype=torch.float32).bfloat16()
    text = torch.cat([torch.zeros(layers, width, channels), *(inputs[:, 2, n, None] for n in (0, 2, 5))], 1)
    want, got = (room.clone().permute(1, 0, 3, 2) for _ in range(2))  # the window is not the last one in memory
    promote_window(want, *rows, inputs, parent, torch.tensor(accepted))
    assert torch.equal(want[:, 5].mT.float(), text[:, -width:])
    assert torch.equal(want[:, 6], want[:, 3])
    interpreted("state_verify:promote_window", got, *rows, inputs, parent, torch.tensor(accepted))
    assert torch.equal(got.nan_to_num(99.0), want.nan_to_num(99.0))
    assert got[:, 7].isnan().all()


def test_bad_window_promotions_are_refused():
    rows = [torch.tensor([0]), torch.tensor([1])]
    tree = (torch.tensor([[-1, 0]]), torch.tensor([1]))
    for inputs, message in (
        (torch.zeros(1, 1, 2, 5), "inputs must have shape"),
        (torch.zeros(1, 1, 2, 4).half(), "to one of"),
    ):
        with pytest.raises(ValueError, match=message):
            promote_window(torch.zeros(1, 2, 4, 3), *rows, inputs, *tree)


def test_a_request_has_the_same_bits_alone_and_in_company(interpreted):
    arguments = problem(True, [FORK, random_tree(10, 3), FORK], 1, 2, 32, 32, torch.float32)
    alone = {n: x[2:] if isinstance(x, Tensor) and n != "pool" else x for n, x in arguments.items()}
    together, apart = interpreted("state_verify", **arguments), interpreted("state_verify", **alone)
    assert all(torch.equal(x[2:], y) for x, y in zip(together, apart, strict=True))


BAD = {
    r"wrong at .*: \[\[0, 1\]\]": {"parent": torch.tensor([[-1, 1, 0]])},
    r"wrong at .*: \[\[0, 0\]\]": {"parent": torch.tensor([[-3, 0, 0]])},
    r"wrong at .*: \[\[0, 2\]\]": {"parent": torch.tensor([[-1, -2, 1]])},
    "parent must have shape": {"parent": torch.tensor([[-1, 0]])},
    "convert parent to": {"parent": torch.tensor([[-1.0, 0, 1]])},
    "key heads must divide 2 heads: 3": {"k": torch.zeros(1, 3, 3, 16), "q": torch.zeros(1, 3, 3, 16)},
    "q must have shape": {"q": torch.zeros(1, 3, 2, 16)},
    "v must have shape": {"v": torch.zeros(1, 3, 1, 16)},
    "beta must have shape": {"beta": torch.zeros(1, 3, 1)},
    "convert pool to": {"pool": torch.zeros(4, 2, 16, 16).half()},
    "slots must name slots .*: 4": {"slots": torch.tensor([4])},
    "dimensions of pool contiguous": {"pool": torch.zeros(4, 2, 16, 32)[..., ::2]},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_trees_are_refused(message: str):
    arguments = problem(True, [[-1, 0, 1]], 1, 2, 16, 16, torch.float32)
    with pytest.raises(ValueError, match=message):
        state_verify(**arguments | BAD[message])


BAD_PROMOTIONS = {
    "accepted must name a node, 0 to 2, or -1: 3": {"accepted": torch.tensor([0, 3])},
    "accepted must name a node, 0 to 2, or -1: 2": {"accepted": torch.tensor([0, 2])},
    "use each slot in one request: 1": {"destination": torch.tensor([1, 3])},
    "values must have shape": {"values": torch.zeros(2, 2, 3, 2, 16)},
    "destination must name slots .*: 5": {"destination": torch.tensor([0, 5])},
}


@pytest.mark.parametrize("message", BAD_PROMOTIONS)
def test_bad_promotions_are_refused_before_any_write(message: str):
    arguments = {
        "pool": torch.ones(1, 5, 2, 16, 16),
        "source": torch.tensor([0, 1]),
        "destination": torch.tensor([0, 1]),
        "k": torch.zeros(1, 2, 3, 1, 16),
        "values": torch.zeros(1, 2, 3, 2, 16),
        "g": torch.zeros(1, 2, 3, 2),
        "parent": torch.tensor([[-1, 0, 1], [-1, 0, -2]]),
        "accepted": torch.tensor([2, 1]),
    }
    promote_path(**arguments)
    with pytest.raises(ValueError, match=message):
        promote_path(**arguments | BAD_PROMOTIONS[message])
    assert torch.equal(arguments["pool"], torch.ones(1, 5, 2, 16, 16))


def test_what_only_the_naive_path_computes_is_refused(interpreted):
    with pytest.raises(ValueError, match="naive path for fp64"):
        interpreted("state_verify", **problem(True, [CHAIN], 1, 1, 16, 16))
    with pytest.raises(ValueError, match="up to 64 nodes: 65"):
        interpreted("state_verify", **problem(True, [list(range(-1, 64))], 1, 1, 16, 16, torch.float32))
