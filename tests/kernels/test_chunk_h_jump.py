"""chunk_h_jump: against token-by-token recurrences in float64 and transformers, Triton against the specification."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid.engine.cpu import vision
from sglang_hybrid_kernels.chunk_h_jump import chunk_h_jump
from tests.kernels.recurrences import recurrence
from tests.kernels.tensors import randn

FAMILIES = ("mamba2", "gla", "gdn", "kda")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 4e-3}


def tokens(family: str, length: int, key_heads: int, heads: int, v: int, k: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Random k, v, log decay (per head, or per channel) and beta, in float64."""
    key = torch.nn.functional.normalize(randn(length, key_heads, k, seed=seed), dim=-1)
    decay = -0.1 * randn(length, heads, k, seed=seed + 1).abs()
    if family in ("mamba2", "gdn"):
        decay = decay[..., 0].clone()
    return key, randn(length, heads, v, seed=seed + 2), decay, torch.sigmoid(randn(length, heads, seed=seed + 3))


def stages(family: str, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, bounds: list[int], size: int) -> Any:
    """What the stages before give chunk_h_jump: k, w, u and the decay summed within each chunk, in float64."""
    heads = value.shape[1]
    wide = key.repeat_interleave(heads // key.shape[1], 1)
    k = key.clone() if decay.dim() == 2 else wide.clone()
    w, u, g = torch.zeros_like(wide), value.clone(), torch.zeros_like(decay)
    for begin, end in itertools.pairwise(bounds):
        for start in range(begin, end, size):
            c = slice(start, min(start + size, end))
            b = g[c] = decay[c].cumsum(0)
            full = b if b.dim() == 3 else b[..., None].expand_as(wide[c])
            if decay.dim() == 3:
                k[c] = wide[c] * (b[-1] - b).exp()
            if family in ("gdn", "kda"):
                gap = (full[:, None] - full[None]).clamp(max=0).exp()
                inner = torch.einsum("rhk,shk,rshk->hrs", wide[c], wide[c], gap).tril(-1)
                a = torch.eye(inner.shape[-1], dtype=inner.dtype) + beta[c].T[:, :, None] * inner
                both = torch.cat([wide[c] * full.exp(), value[c]], -1) * beta[c][..., None]
                solved = torch.linalg.solve_triangular(a, both.transpose(0, 1), upper=False).transpose(0, 1)
                w[c], u[c] = solved.split([wide.shape[-1], value.shape[-1]], -1)
    return {"k": k, "w": w if family in ("gdn", "kda") else None, "u": u, "g": g}


def entries(family: str, count: int, heads: int, v: int, k: int) -> dict[str, Tensor]:
    shape = {"mamba2": (), "gla": (k,)}.get(family, (k, k))
    transition = randn(count, heads, *shape, seed=20)
    transition = transition / k**0.5 if len(shape) == 2 else transition.sigmoid()
    return {"transition": transition, "end_state": randn(count, heads, v, k, seed=21)}


def jumped(state: Tensor, transition: Tensor, end_state: Tensor) -> Tensor:
    if transition.dim() == 3:
        return torch.einsum("hvk,hkj->hvj", state, transition) + end_state
    return (
        torch.einsum("hvk,hk->hvk", state, transition.reshape(state.shape[0], -1).expand(-1, state.shape[2]))
        + end_state
    )


LENGTHS = [16, 0, 65, 3, 40, 1]
ROWS = {"request_rows": [0, 3, 3, 5, 6], "jump": [-1, 2, 0, 1, -1, 1], "slots": [4, 2, -1, 0]}


def rows(lengths: list[int], request_rows: list[int], jump: list[int], slots: list[int]) -> dict[str, Tensor]:
    cu_seqlens = [0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0]
    named = {"cu_seqlens": cu_seqlens, "request_rows": request_rows, "jump": jump, "slots": slots}
    return {name: torch.tensor(value, dtype=torch.int64) for name, value in named.items()}


def problem(family: str, key_heads: int, heads: int, v: int, k: int, size: int, lengths: list[int]) -> Any:
    """(arguments in float64, the state every slot should end with)."""
    index = rows(lengths, **ROWS)
    bounds = index["cu_seqlens"].tolist()
    raw = tokens(family, sum(lengths), key_heads, heads, v, k)
    segments, pool = entries(family, 3, heads, v, k), randn(6, heads, v, k, seed=22)
    want = pool.clone()
    for request, slot in enumerate(ROWS["slots"]):
        state = pool[slot] if slot >= 0 else torch.zeros_like(pool[0])
        for row in range(ROWS["request_rows"][request], ROWS["request_rows"][request + 1]):
            entry = ROWS["jump"][row]
            if entry >= 0:
                state = jumped(state, segments["transition"][entry], segments["end_state"][entry])
            state = recurrence(family, state, *(x[bounds[row] : bounds[row + 1]] for x in raw))
        if slot >= 0:
            want[slot] = state
    made = stages(family, *raw, bounds, size)
    return {**made, "state": pool, **index, **segments, "chunk_size": size}, want


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_recurrence(family: str, size: int):
    key_heads = 4 if family in ("kda", "gla") else 2
    arguments, want = problem(family, key_heads, 4, 12, 8, size, LENGTHS)
    h, v_new = chunk_h_jump(**arguments)
    assert (arguments["state"] - want).abs().max() < 1e-12
    assert h.shape[0] == sum(-(-length // size) for length in LENGTHS)
    assert v_new.shape == arguments["u"].shape
    assert (v_new is arguments["u"]) == (arguments["w"] is None)


def test_outputs_are_those_of_transformers():
    """h and v_new give the layer's output as transformers' chunked rule computes it, for several lengths."""
    vision.install()
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    heads, v, k, size = 2, 16, 8, 64
    for length in (1, 63, 64, 65, 200):
        raw = tokens("gdn", length, heads, heads, v, k, seed=length)
        q = randn(length, heads, k, seed=7)
        index = rows([length], [0, 1], [-1], [0])
        state = randn(1, heads, v, k)
        batch = [x[None].float() for x in (q, *raw)]
        want, want_state = hf.torch_chunk_gated_delta_rule(
            *batch, initial_state=state.mT.float(), output_final_state=True
        )
        made = stages("gdn", *raw, [0, length], size)
        h, v_new = chunk_h_jump(**made, state=state, **index, **entries("gdn", 1, heads, v, k))
        for chunk, start in enumerate(range(0, length, size)):
            c = slice(start, start + size)
            b, qc = made["g"][c], q[c] * k**-0.5
            gap = (b[:, None] - b[None]).clamp(max=0).exp()
            inner = torch.einsum("rhk,shk,rsh->rsh", qc, made["k"][c], gap)
            inner = inner * torch.ones(inner.shape[:2]).tril()[..., None]
            out = torch.einsum("rhk,hvk->rhv", qc * b.exp()[..., None], h[chunk])
            out += torch.einsum("rsh,shv->rhv", inner, v_new[c])
            assert (out - want[0, c]).abs().max() < 1e-5
        assert (state[0].mT - want_state[0]).abs().max() < 2e-5


CASES = [  # family, key_heads, heads, V, K, chunk_size, token dtype, state dtype, lengths
    ("gdn", 1, 2, 64, 64, 64, torch.float32, torch.float32, [1, 63, 64, 65, 0, 500]),
    ("gdn", 1, 1, 128, 128, 16, torch.float32, torch.float32, LENGTHS),
    ("gdn", 2, 8, 32, 64, 32, torch.bfloat16, torch.float32, LENGTHS),
    ("kda", 2, 2, 64, 64, 64, torch.float16, torch.float32, LENGTHS),
    ("gla", 3, 3, 64, 32, 16, torch.float32, torch.bfloat16, LENGTHS),
    ("mamba2", 1, 4, 32, 32, 16, torch.float32, torch.float16, LENGTHS),  # --mamba-ssm-dtype float16
    ("mamba2", 2, 6, 80, 128, 64, torch.float32, torch.float32, LENGTHS),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}x{case[3]}x{case[4]}-{case[6]}")
def test_triton_is_the_specification(interpreted, case):
    family, key_heads, heads, v, k, size, token_type, state_type, lengths = case
    arguments, _ = problem(family, key_heads, heads, v, k, size, lengths)
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            by_token = name in ("k", "w", "u")
            arguments[name] = x.to(token_type if by_token else state_type if name == "state" else torch.float32)
    want = dict(arguments, state=arguments["state"].clone())
    room = torch.full((6, 2, heads, v, k), float("nan"), dtype=state_type)
    room[:, 1] = arguments["state"]
    room[[1, 3, 5], 1] = float("nan")
    arguments["state"] = room[:, 1]  # a slot's pitch spans other layers
    h, v_new = interpreted("chunk_h_jump", **arguments)
    want_h, want_v_new = chunk_h_jump(**want)
    tolerance = max(TOLERANCE[token_type], TOLERANCE[state_type])
    assert (v_new - want_v_new).abs().max() <= tolerance * want_v_new.abs().max()
    assert (h - want_h).abs().max() <= tolerance * want_h.abs().max()
    used = [0, 2, 4]
    assert (room[used, 1] - want["state"][used]).abs().max() <= tolerance * want["state"].abs().max()
    assert torch.equal(room[2, 1], want["state"][2])  # a request without rows
    assert room[[1, 3, 5]].isnan().all()
    assert room[:, 0].isnan().all()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int8])
def test_stored_operators_and_vanishing_heads(interpreted, kind: torch.dtype):
    arguments, _ = problem("gdn", 2, 2, 32, 32, 16, LENGTHS)
    arguments = {
        name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in arguments.items()
    }
    for name in ("transition", "end_state"):
        x = arguments[name]
        if kind is torch.int8:
            arguments[f"{name}_scale"] = scale = x.abs().amax(-2) / 127
            x = x / scale[..., None, :]
        arguments[name] = x.round().to(kind) if kind is torch.int8 else x.to(kind)
    arguments |= {name: x.flatten(0, 1) for name, x in arguments.items() if name.startswith("transition")}
    arguments["transition_rows"] = torch.tensor([[0, 1], [-1, 3], [4, 2]], dtype=torch.int32)
    if kind is torch.bfloat16:
        arguments["transition"][5] = float("nan")
    want = dict(arguments, state=arguments["state"].clone())
    h, v_new = interpreted("chunk_h_jump", **arguments)
    want_h, want_v_new = chunk_h_jump(**want)
    for got, wanted in ((h, want_h), (v_new, want_v_new), (arguments["state"], want["state"])):
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_seams_around_jumped_segments_end_where_the_whole_text_does(interpreted, family: str):
    """Interiors become operators, everything else is run: with the same k, v, g, beta the state is that of the text."""
    key_heads, heads, d, size = 2, 2, 32, 16
    lengths, interior = [20, 70, 12, 33, 5], [1, 3]  # seam, segment, seam, segment, query
    raw = tokens(family, sum(lengths), key_heads, heads, d, d)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    tail = (d, d) if family in ("gdn", "kda") else (d,) if family == "gla" else ()
    segments = {"transition": torch.zeros(2, heads, *tail), "end_state": torch.zeros(2, heads, d, d)}
    for entry, part in enumerate(interior):
        span = slice(starts[part], starts[part + 1])
        k, v, g, beta = (x[span].float() for x in raw)
        beta = None if family in ("mamba2", "gla") else beta
        packed = (k, v, g, beta, torch.tensor([0, lengths[part]]), torch.tensor([entry]))
        interpreted(
            "chunk_transition", *packed, segments["end_state"], segments["transition"], delta=bool(beta is not None)
        )
    run = torch.cat(
        [torch.arange(a, a + n) for i, (a, n) in enumerate(zip(starts, lengths, strict=False)) if i not in interior]
    )
    index = rows([20, 12, 5], [0, 3], [-1, 0, 1], [0])
    made = stages(family, *(x[run] for x in raw), index["cu_seqlens"].tolist(), size)
    made = {name: None if x is None else x.float() for name, x in made.items()}
    state = randn(1, heads, d, d, seed=9)
    want = recurrence(family, state[0], *raw)
    narrow = state.float()
    interpreted("chunk_h_jump", **made, state=narrow, **index, **segments, chunk_size=size)
    assert (narrow[0] - want).abs().max() < 1e-5 * want.abs().max()


def cut(interpreted, lengths: list[int], calls: list[list[int]], state_type: torch.dtype) -> tuple[Tensor, ...]:
    """The final state, h and v_new of one request whose text is cut into rows, and its rows into calls."""
    total, size, done = sum(lengths), 16, 0
    raw = tokens("gdn", total, 1, 2, 32, 32)
    state, parts = randn(1, 2, 32, 32, seed=5).to(state_type), []
    for call in calls:
        span = slice(done, done + sum(call))
        bounds = [0, *torch.tensor(call).cumsum(0).tolist()]
        made = stages("gdn", *(x[span] for x in raw), bounds, size)
        made = {name: x.float() for name, x in made.items()}
        index = rows(call, [0, len(call)], [-1] * len(call), [0])
        segments = {name: x.float() for name, x in entries("gdn", 1, 2, 32, 32).items()}
        parts.append(interpreted("chunk_h_jump", **made, state=state, **index, **segments, chunk_size=size))
        done += sum(call)
    return state, *(torch.cat(x) for x in zip(*parts, strict=True))


@pytest.mark.usefixtures("fixed_order")
def test_a_hit_and_a_cold_run_give_the_same_bits_on_the_chunk_grid(interpreted):
    cold = cut(interpreted, [90], [[90]], torch.float32)
    rows_of_one_call = cut(interpreted, [32, 58], [[32, 58]], torch.float32)
    hit = cut(interpreted, [48, 42], [[48], [42]], torch.float32)
    for same in (rows_of_one_call, hit):
        assert all(torch.equal(x, y) for x, y in zip(cold, same, strict=True))
    off_the_grid = cut(interpreted, [40, 50], [[40], [50]], torch.float32)
    rounded = cut(interpreted, [48, 42], [[48], [42]], torch.bfloat16)
    assert not torch.equal(off_the_grid[0], cold[0])
    assert (off_the_grid[0] - cold[0]).abs().max() < 1e-5
    assert not torch.equal(rounded[0].float(), cold[0])


def test_a_request_has_the_same_bits_alone_and_in_company(interpreted):
    arguments, _ = problem("gdn", 1, 2, 32, 32, 16, LENGTHS)
    arguments = {n: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in arguments.items()}
    first = sum(LENGTHS[:3])
    alone = {n: x[:first] if n in ("k", "w", "u", "g") else x for n, x in arguments.items()}
    alone |= rows(LENGTHS[:3], [0, 3], ROWS["jump"][:3], [4]) | {"state": arguments["state"].clone()}
    h, v_new = interpreted("chunk_h_jump", **arguments)
    h_alone, v_new_alone = interpreted("chunk_h_jump", **alone)
    assert torch.equal(h[: h_alone.shape[0]], h_alone)
    assert torch.equal(v_new[:first], v_new_alone)
    assert torch.equal(arguments["state"][4], alone["state"][4])


def test_without_reading_the_rows_h_has_room_to_spare(interpreted):
    arguments, _ = problem("gdn", 1, 2, 16, 16, 16, LENGTHS)
    arguments = {n: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in arguments.items()}
    trusted = dict(arguments, state=arguments["state"].clone(), check_slots=False)
    h, _ = interpreted("chunk_h_jump", **arguments)
    roomy, _ = interpreted("chunk_h_jump", **trusted)
    assert roomy.shape[0] == sum(LENGTHS) // 16 + len(LENGTHS) > h.shape[0]
    assert torch.equal(roomy[: h.shape[0]], h)


BAD = {
    "key heads must divide 2: 3": {"k": torch.zeros(5, 3, 16)},
    "u must have shape": {"u": torch.zeros(5, 2, 8)},
    "w must have the dtype of k": {"w": torch.zeros(5, 2, 16, dtype=torch.float16)},
    "g must have shape": {"g": torch.zeros(5, 3)},
    "dimensions of state contiguous": {"state": torch.zeros(7, 2, 16, 16).transpose(2, 3)},
    "chunk_size must be one of": {"chunk_size": 48},
    "slots must name slots .*: 7": {"slots": torch.tensor([7])},
    "slot of its own": {"slots": torch.tensor([1, 1]), "request_rows": torch.tensor([0, 1, 2])},
    "jump must name segment entries, -1 to 2: 3": {"jump": torch.tensor([-1, 3])},
    "must not be negative": {"cu_seqlens": torch.tensor([0, 6, 5])},
    "must end at the number of tokens, 5: 4": {"cu_seqlens": torch.tensor([0, 3, 4])},
    "must end at the number of tokens, 2: 1": {"request_rows": torch.tensor([0, 1])},
    "convert jump to": {"jump": torch.tensor([-1.0, 0.0])},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_before_any_write(message: str):
    made = {"k": torch.zeros(5, 1, 16), "w": torch.zeros(5, 2, 16), "u": torch.zeros(5, 2, 16), "g": torch.zeros(5, 2)}
    segments = {name: x.float() for name, x in entries("gdn", 3, 2, 16, 16).items()}
    arguments = {**made, "state": torch.ones(6, 2, 16, 16), **rows([3, 2], [0, 2], [-1, 2], [1]), **segments}
    before = arguments["state"].clone()
    with pytest.raises(ValueError, match=message):
        chunk_h_jump(**arguments | BAD[message])
    assert torch.equal(arguments["state"], before)
