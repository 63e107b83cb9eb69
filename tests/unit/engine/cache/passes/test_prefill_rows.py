"""The rows of a prefill's states: built without waiting for the device, written to the pool and not to a copy of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.passes import forward, kernels, prefill_states
from sglang_hybrid.engine.cache.requests import Checkpoint, tracked
from sglang_hybrid.engine.cpu import kda
from sglang_hybrid_kernels import warm
from tests.versions import since

MAMBA2 = since("0.5.21", "states of Mamba-2 that several requests of a pass have on one grid")

WINDOW = 4
COLUMNS = (
    "track_conv_indices", "conv_states_mask_indices", "track_ssm_h_src", "track_ssm_h_dst", "track_ssm_final_src",
    "track_ssm_final_dst", "track_ssm_seq_idx", "track_ssm_end_locs", "track_ssm_recompute_dst",
)  # fmt: skip


class Extending:
    def is_extend(self) -> bool:
        return True

    def is_target_verify(self) -> bool:
        return False


class Backend:
    """As much of SGLang's backend of linear layers as a prefill's metadata needs."""

    def __init__(self, device: str, dispatcher: Any, chunk: int = 64) -> None:
        self.kernel_dispatcher = dispatcher
        self.mamba_chunk_size = chunk
        self.conv_states_shape = (1, 8, WINDOW)
        self.forward_metadata = SimpleNamespace(
            query_start_loc=torch.zeros(3, dtype=torch.int32, device=device),
            mamba_cache_indices=torch.tensor([11, 12], dtype=torch.int32).to(device),
            has_mamba_track_mask=False, num_state_checkpoints=0, state_checkpoint_every_n_tokens=0,
        )  # fmt: skip
        if dispatcher is None:
            del self.kernel_dispatcher

    def _translate_mamba_indices(self, slots: torch.Tensor) -> torch.Tensor:
        return slots


def triton() -> Any:
    return SimpleNamespace(extend_uses_state_checkpoints=False)


def flashinfer() -> Any:
    return SimpleNamespace(extend_uses_state_checkpoints=True)


def a_pass(
    backend: Backend,
    positions: list[list[int]],
    prefixes: list[int],
    lengths: list[int],
    mode: Any = None,
    **more: Any,
) -> Any:
    """Run the hooks of a pass; request i saves states at `positions[i]` to slots 100, 101, ..."""
    device, slot, requests = backend.forward_metadata.query_start_loc.device, 100, []
    for wanted in positions:
        req = SimpleNamespace()
        for at in wanted:
            tracked(req).planned.append(Checkpoint(at, at, torch.tensor([slot]).to(device)))
            slot += 1
        requests.append(req)
    mode = mode or Extending()
    batch = SimpleNamespace(forward_mode=mode, reqs=requests, prefix_lens=prefixes, extend_lens=lengths)
    forward.carry(None, None, batch, SimpleNamespace(is_draft_worker=False))
    # A draft model passes over the same prompts before the states of this pass are saved.
    forward.carry(None, None, batch, SimpleNamespace(is_draft_worker=True))
    passed = SimpleNamespace(
        forward_mode=mode, extend_prefix_lens_cpu=prefixes, extend_seq_lens_cpu=lengths, mamba_track_mask=None, **more
    )
    forward.extend(None, backend, passed)
    return passed, [c.written for req in requests for c in tracked(req).planned]


def columns(backend: Backend) -> dict[str, list[Any]]:
    held = {name: getattr(backend.forward_metadata, name, None) for name in COLUMNS}
    return {name: values.tolist() for name, values in held.items() if values is not None}


POSITIONS, PREFIXES, LENGTHS = [[64, 100, 130], [192, 256]], [0, 128], [130, 200]


def test_a_delta_rule_kernel_gives_the_states_before_its_chunks() -> None:
    backend = Backend("cpu", triton())
    assert a_pass(backend, POSITIONS, PREFIXES, LENGTHS)[1] == [True] * 5
    found = columns(backend)
    assert found["track_ssm_final_src"] == [11]  # the first request's own state, behind its last token
    assert found["track_ssm_final_dst"] == [102]
    # The first request has chunks 0, 1, 2, the second 3, 4, 5, 6.
    assert list(zip(found["track_ssm_h_src"], found["track_ssm_h_dst"], strict=True)) == [(1, 100), (4, 103), (5, 104)]
    inside = forward.inside_chunks()
    assert inside is not None
    assert (inside.sequences.tolist(), inside.positions.tolist(), inside.slots.tolist()) == ([0], [100], [101])
    ends = dict(zip(found["conv_states_mask_indices"], found["track_conv_indices"], strict=True))
    assert ends == {slot: list(range(at - WINDOW, at)) for slot, at in enumerate((64, 100, 130, 194, 258), 100)}


def test_flashinfer_gives_the_states_behind_every_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "checkpoint_grid", lambda: 64)
    backend = Backend("cpu", flashinfer())
    assert a_pass(backend, POSITIONS, PREFIXES, LENGTHS)[1] == [True, False, True, True, True], "100 is none of them"
    found, metadata = columns(backend), backend.forward_metadata
    # The first request has those behind 64 and 128 tokens, the second those behind 64, 128 and 192.
    assert list(zip(found["track_ssm_h_src"], found["track_ssm_h_dst"], strict=True)) == [(0, 100), (2, 103), (3, 104)]
    assert metadata.state_checkpoint_cu_starts.tolist() == [0, 2, 5]
    assert (metadata.num_state_checkpoints, metadata.state_checkpoint_every_n_tokens) == (5, 64)
    assert forward.inside_chunks() is None


class KDAAttnBackend(Backend):
    """By its name: Kimi delta attention, which copies a request's one state from a snapshot."""


def test_kimi_delta_attention_leaves_starts_of_chunks_to_us() -> None:
    backend = KDAAttnBackend("cpu", SimpleNamespace())
    held = backend.forward_metadata
    held.track_ssm_h_src, held.track_ssm_h_dst = torch.tensor([2]), torch.tensor([7])  # SGLang's, of the snapshot
    assert a_pass(backend, POSITIONS, PREFIXES, LENGTHS)[1] == [True] * 5
    found, beside, inside = columns(backend), forward.beside(), forward.inside_chunks()
    assert (found["track_ssm_h_src"], found["track_ssm_h_dst"], found["track_ssm_final_dst"]) == ([2], [7], [102])
    assert beside is not None
    assert inside is not None
    assert (beside.chunks.tolist(), beside.slots.tolist()) == ([1, 4, 5], [100, 103, 104])
    chunks, pool = torch.randn(1, 7, 2, 3, 4, dtype=torch.bfloat16), torch.zeros(128, 2, 3, 4)
    kernels.roll(None, backend, None, chunks, pool, held)
    assert torch.equal(pool[[100, 103, 104]], chunks[0, [1, 4, 5]].float())
    assert pool.flatten(1).any(1).nonzero().flatten().tolist() == [100, 103, 104]
    a_pass(backend, [[], []], PREFIXES, LENGTHS)
    assert forward.beside() is None


def test_kimi_delta_attention_inside_a_chunk_equals_the_tokens_one_by_one() -> None:
    heads, size, tokens = 2, 16, 100
    backend = KDAAttnBackend("cpu", SimpleNamespace())
    a_pass(backend, [[90], []], [0, 0], [tokens, 30])
    rng = torch.Generator().manual_seed(1)
    q, k, v, raw = (torch.randn(1, tokens + 30, heads, size, generator=rng) for _ in range(4))
    beta, A_log = torch.randn(1, tokens + 30, heads, generator=rng), torch.zeros(1, 1, heads, 1)
    dt_bias = torch.randn(heads * size, generator=rng)
    pool, bounds = torch.zeros(128, heads, size, size), torch.tensor([0, tokens, tokens + 30], dtype=torch.int32)
    more = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": -4.0, "beta_is_raw": True, "query_start_loc": bounds}

    def extend(_: Any, ssm_states: Any, query_start_loc: Any, **given: Any) -> Any:
        return kda.chunk_kda(
            **given, initial_state=ssm_states, cu_seqlens=query_start_loc, use_qk_l2norm_in_kernel=True,
            output_intermediate_states=True,
        )  # fmt: skip

    _, chunks = kernels.keep_by_channel(extend, None, q, k, v, raw, beta, ssm_states=torch.zeros_like(pool[:2]), **more)
    kernels.roll(None, backend, None, chunks, pool, backend.forward_metadata)
    one = torch.zeros(1, heads, size, size)
    for t in range(90):
        now = (x[:, t : t + 1] for x in (q, k, v))
        kda.recurrent_kda(
            **dict(zip("qkv", now, strict=True)), a=raw[:, t : t + 1], b=beta[:, t : t + 1], A_log=A_log,
            dt_bias=dt_bias, lower_bound=-4.0, initial_state_source=one, initial_state_indices=torch.tensor([0]),
            is_kda=True,
        )  # fmt: skip
    torch.testing.assert_close(pool[100], one[0], atol=1e-5, rtol=1e-4)


def test_a_pass_with_rows_of_ours_runs_outside_a_graph_that_has_the_linear_layers() -> None:
    def running(backend: Any) -> Any:
        layers = SimpleNamespace(linear_attn_backend=backend)
        return SimpleNamespace(model_runner=SimpleNamespace(attn_backend=layers, is_draft_worker=False))

    linear = SimpleNamespace(supports_prefill_graph_extend=lambda: True)
    graphs = running(linear)
    elsewhere = running(SimpleNamespace())
    alone, voting = SimpleNamespace(global_num_tokens_cpu=None), SimpleNamespace(global_num_tokens_cpu=[3, 4])

    def carried(positions: list[int]) -> None:
        req = SimpleNamespace()
        tracked(req).planned.extend(Checkpoint(at, at, torch.tensor([9])) for at in positions)
        batch = SimpleNamespace(forward_mode=Extending(), reqs=[req], prefix_lens=[0], extend_lens=[200])
        forward.carry(None, None, batch, SimpleNamespace(is_draft_worker=False))

    carried([64])
    assert forward.outside_a_graph(True, graphs, alone) is False
    assert forward.outside_a_graph(True, running(type("ShortConvAttnBackend", (), {})()), alone) is False
    assert forward.outside_a_graph(True, graphs, voting) is None
    assert forward.outside_a_graph(True, elsewhere, alone) is None
    assert forward.outside_a_graph(False, graphs, alone) is None
    carried([])
    assert forward.outside_a_graph(True, graphs, alone) is None


@pytest.mark.parametrize(
    "backend",
    [lambda: Backend("cpu", triton()), lambda: Backend("cpu", flashinfer()), lambda: Backend("cpu", None),
     lambda: KDAAttnBackend("cpu", SimpleNamespace())],
    ids=["triton", "flashinfer", "mamba2", "kda"],
)  # fmt: skip
def test_a_prefill_beside_requests_that_decode_saves_what_it_would_alone(
    monkeypatch: pytest.MonkeyPatch, backend: Callable[[], Backend]
) -> None:
    """With --enable-mixed-chunk every prefill under load is one; what those that decode planned lies behind them."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    monkeypatch.setattr(compat, "checkpoint_grid", lambda: 64)
    alone, beside = backend(), backend()
    _, written = a_pass(alone, [[64, 128], []], [0, 0], [130, 40])
    assert written == [True, True]
    _, mixed = a_pass(beside, [[64, 128], [], [64]], [0, 0, 700], [130, 40, 1], ForwardMode.MIXED)
    assert mixed == [True, True, False]
    assert columns(beside) == columns(alone)


def test_a_batch_whose_halves_may_run_in_its_place_saves_nothing() -> None:
    """The halves are planned behind it, by other backends: what those would drop must not pass for written."""
    backend = KDAAttnBackend("cpu", SimpleNamespace())
    _, written = a_pass(backend, POSITIONS, PREFIXES, LENGTHS, tbo_children=[SimpleNamespace(), SimpleNamespace()])
    assert written == [False] * 5
    assert not backend.forward_metadata.has_mamba_track_mask
    assert forward.beside() is None


def test_flashinfers_plan_for_sglang_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "checkpoint_grid", lambda: 0)
    backend = Backend("cpu", flashinfer())
    held = backend.forward_metadata
    held.num_state_checkpoints, held.state_checkpoint_every_n_tokens = 5, 64
    held.track_ssm_h_src, held.track_ssm_h_dst = torch.tensor([1, 4]), torch.tensor([7, 8])
    a_pass(backend, [[64], []], PREFIXES, LENGTHS)
    assert columns(backend)["track_ssm_h_src"] == [1, 4, 0]
    assert columns(backend)["track_ssm_h_dst"] == [7, 8, 100]
    assert not hasattr(held, "state_checkpoint_cu_starts")


def test_mamba2_has_one_grid_of_chunks_and_computes_the_others_again() -> None:
    backend = Backend("cpu", None)
    assert all(a_pass(backend, [[64], [192, 254]], PREFIXES, LENGTHS)[1])
    found = columns(backend)
    assert list(zip(found["track_ssm_h_src"], found["track_ssm_h_dst"], strict=True)) == [(1, 100), (4, 102)]
    assert (found["track_ssm_seq_idx"], found["track_ssm_end_locs"]) == ([1], [194])
    assert found["track_ssm_recompute_dst"] == [101]


@pytest.mark.parametrize("dispatcher", [triton, flashinfer, lambda: None])
def test_nothing_waits_for_the_device(dispatcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the meta device have no values: whoever asks for one fails."""
    monkeypatch.setattr(compat, "checkpoint_grid", lambda: 64)
    backend = Backend("meta", dispatcher())
    assert any(a_pass(backend, POSITIONS, PREFIXES, LENGTHS)[1])
    assert backend.forward_metadata.track_ssm_h_src.device.type == "meta"


def test_mamba2_copies_states_of_a_batch_without_a_mask() -> None:
    backend = Backend("cpu", None)
    a_pass(backend, [[64], []], PREFIXES, LENGTHS)
    kept = SimpleNamespace(mamba_track_mask=None)  # of a CUDA graph: not the batch that the rows were added for
    seen = []

    def original(*args: Any, **kwargs: Any) -> None:
        seen.append((args[5] if len(args) > 5 else kwargs["forward_batch"]).mamba_track_mask is not None)

    forward.with_mask(original, backend, None, None, None, 0, kept)
    forward.with_mask(original, backend, mixer=None, forward_batch=kept)
    assert kept.mamba_track_mask is None
    backend.forward_metadata = SimpleNamespace()  # of a later pass that has no rows of ours
    forward.with_mask(original, backend, None, None, None, 0, kept)
    assert seen == [True, True, False]


def test_states_inside_a_chunk_go_to_the_pool_and_not_to_the_copy_that_the_layer_computes_on() -> None:
    heads, k_size, v_size, tokens = 2, 4, 3, 130
    backend = Backend("cpu", triton())
    a_pass(backend, [[100], []], [0, 0], [tokens, 4])
    torch.manual_seed(0)
    k, v = torch.randn(1, tokens + 4, heads, k_size), torch.randn(1, tokens + 4, heads, v_size)
    g, beta = -torch.rand(1, tokens + 4, heads), torch.rand(1, tokens + 4, heads)
    chunks = torch.randn(1, 4, heads, v_size, k_size)
    copy, pool = torch.zeros(2, heads, v_size, k_size), torch.zeros(128, heads, v_size, k_size)
    bounds = torch.tensor([0, tokens, tokens + 4], dtype=torch.int32)
    kernels.keep(lambda *_, **__: (v, None, chunks), None, k, k, v, g, beta, ssm_states=copy, query_start_loc=bounds)
    kernels.roll(None, backend, None, chunks, pool, backend.forward_metadata)
    assert not copy.any()
    assert pool[100].any()
    assert pool.nonzero()[:, 0].unique().tolist() == [100]
    pool.zero_()
    kernels.roll(None, backend, None, chunks, pool, backend.forward_metadata)
    assert not pool.any(), "a layer's chunks are used once"


def runner(
    backend: str,
    kernel: str = "TritonGDNKernel",
    checkpoints: bool = False,
    model: str = "Qwen3NextForCausalLM",
    attends: bool = True,
) -> Any:
    dispatcher = SimpleNamespace(extend_kernel=type(kernel, (), {})(), extend_uses_state_checkpoints=checkpoints)
    linear = type(backend, (), {"kernel_dispatcher": dispatcher, "mamba_chunk_size": 64})()
    return SimpleNamespace(
        attn_backend=SimpleNamespace(linear_attn_backend=linear) if attends else linear,
        dtype=torch.bfloat16,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=[model])),
    )


@pytest.mark.parametrize(
    ("model_runner", "settings", "step", "remedy"),
    [
        (runner("GDNAttnBackend"), {}, 64, ""),
        (runner("GDNAttnBackend", "FlashInferGDNKernel", True), {}, 128, ""),
        (runner("GDNAttnBackend", "CuteDSLGDNKernel"), {}, 0, "--linear-attn-prefill-backend triton"),
        pytest.param(runner("Mamba2AttnBackend"), {}, 64, "", marks=MAMBA2),
        pytest.param(runner("Mamba2AttnBackend", model="OfNextYear"), {}, 64, "", marks=MAMBA2),
        pytest.param(runner("Mamba2AttnBackend", model="Mamba2ForCausalLM", attends=False), {}, 64, "", marks=MAMBA2),
        (runner("Mamba2AttnBackend", model="FalconMambaForCausalLM"), {}, 0, ""),  # its mixer asserts
        (runner("GDNAttnBackend", model="JetNemotronForCausalLM"), {}, 0, ""),  # its block has code of its own
        (runner("ShortConvAttnBackend", model="Lfm2ForCausalLM"), {}, 1, ""),
        (runner("ShortConvAttnBackend", model="ZayaForCausalLM"), {}, 0, ""),  # two stages and the token before
        (runner("KDAAttnBackend", "TritonKDAKernel"), {}, 64, ""),
        (runner("KDAAttnBackend", "FlashKDAKernel"), {}, 0, "--linear-attn-prefill-backend triton"),
        (runner("GDNAttnBackend"), {"speculative_algorithm": "EAGLE"}, 64, ""),  # a prefill is one all the same
        (
            runner("GDNAttnBackend"),
            {"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="full"))},
            0,
            "--cuda-graph-backend-prefill breakable",
        ),
    ],
)
def test_what_a_prefill_gives_back(
    monkeypatch: pytest.MonkeyPatch, model_runner: Any, settings: dict[str, Any], step: int, remedy: str
) -> None:
    monkeypatch.setattr(compat, "checkpoint_grid", lambda: 128)
    monkeypatch.setattr(compat, "resolved", lambda args: args)
    found = prefill_states.of(model_runner, SimpleNamespace(**settings), inside=False)
    assert (found.step, found.remedy) == (step, remedy)
    assert ("every" in found.summary()) is (step > 1)
    assert remedy in found.shortcoming()


def test_no_gated_delta_rule_takes_its_states_from_a_snapshot() -> None:
    """One that does copies a request's one state from it, by row: ours beside it would get the same one.

    They would have to be written behind SGLang's copy then, as those of Kimi delta attention are (`forward.beside`).
    """
    from sglang.srt.layers.attention.linear.kernels import gdn_flashinfer, gdn_triton

    for kernel in (gdn_triton.TritonGDNKernel, gdn_flashinfer.FlashInferGDNKernel):
        assert not getattr(kernel, "supports_track_state_snapshot", False)


@pytest.mark.parametrize("heads", [8, 0])
def test_kernels_are_warmed_for_the_heads_of_the_rank(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    warmed: list[tuple[str, Any]] = []
    monkeypatch.setattr(warm, "warm_copy_slots", lambda pools: warmed.append(("copy", [x.dtype for x in pools])))
    monkeypatch.setattr(
        warm, "warm_state_at", lambda into, **given: warmed.append(("state", (tuple(into.shape), given)))
    )
    conv, temporal = torch.zeros(3, 5, 8, WINDOW, dtype=torch.bfloat16), torch.zeros(3, 5, 4, 6, 7)
    pool = SimpleNamespace(mamba_cache=SimpleNamespace(conv=[conv], temporal=temporal))
    config = SimpleNamespace(linear_num_value_heads=heads, linear_num_key_heads=4)  # the rank has half of them
    model_runner = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config), dtype=torch.bfloat16)
    kernels.warm(pool, model_runner)
    given = {"key_heads": 2, "token_dtype": torch.bfloat16, "by_channel": False, "l2norm": True}
    assert warmed == [("copy", [torch.bfloat16, torch.float32]), ("state", ((5, 4, 6, 7), given))][: 2 if heads else 1]
    monkeypatch.setattr(kernels, "ours", lambda _: False)
    kernels.warm(pool, model_runner)
    assert len(warmed) == (2 if heads else 1), "SGLang's own are not ours to warm"
