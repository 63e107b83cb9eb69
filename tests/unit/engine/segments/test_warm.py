"""What a start warms is all that Triton compiles for composed passes: cross-compiled here, and nothing runs."""

from __future__ import annotations

import importlib
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.engine.segments import attention, linear, stages
from sglang_hybrid.engine.segments.attention import AttentionPass
from sglang_hybrid.engine.segments.batch import Composed, PassBatch
from sglang_hybrid.engine.segments.draft import build
from sglang_hybrid.engine.segments.linear import LinearPass, Pools
from sglang_hybrid.engine.segments.operators import Operators
from sglang_hybrid.engine.segments.store import Shapes, Store
from sglang_hybrid.engine.segments.warm import warm
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.segment.index import Costs, SegmentIndex
from sglang_hybrid.segment.keys import Identity
from sglang_hybrid.segment.prompt import Limits, SegmentedPrompt
from tests.kernels.tensors import whole

causal_conv1d_triton = importlib.import_module("sglang.kernels.ops.mamba.causal_conv1d_triton")
ahead_of_time = importlib.import_module("benchmarks.kernels.compile")
SMALL = ModelSpec("toy", kv_bytes_per_token=512, checkpoint_bytes=58_368, flops_per_token=1e6, flops_per_token_pair=10)
CPU, WINDOW, LAYERS, SLOTS, CONTEXT = torch.device("cpu"), 3, (3, 7), 700, 4096
HEADS, KEY_HEADS, QUERIES, SIZE, CHANNELS = 4, 2, 6, 64, 48
Launches = list[tuple[str, dict[str, Any], Any]]


def module(kind: str, **values: Any) -> Any:
    made = type(kind, (torch.nn.Module,), {})()
    vars(made).update(values)
    return made


class Server:
    """The pools, entries and layers that composed passes of one family run over."""

    def __init__(self, family: str, stored: str) -> None:
        dense = family != "mamba2"
        shapes = Shapes(1, (HEADS, SIZE, SIZE), (CHANNELS, WINDOW), torch.bfloat16, dense, 2, 2, 64, 64, torch.bfloat16)
        self.store = Store(shapes, stored, 40 << 20, CPU)
        sizes = (self.store.state_bytes, self.store.token_bytes, 1)
        costs = Costs(SMALL, *sizes, self.store.transitions, self.store.transition_bytes)
        self.index = SegmentIndex(self.store.blocks, costs)
        keys, values = (torch.zeros(2, SLOTS, 2, 64, dtype=torch.bfloat16) for _ in range(2))
        pairs = {layer: (keys[n], values[n]) for n, layer in enumerate(LAYERS)}
        self.kv = SimpleNamespace(get_kv_buffer=pairs.__getitem__)
        self.by_channel = family == "kda"
        self.key_heads = HEADS if self.by_channel else KEY_HEADS
        self.temporal = torch.zeros(3, 2, HEADS, SIZE, SIZE).transpose(0, 1)[0]
        self.attention = module(
            "RadixAttention", layer_id=3, tp_q_head_num=QUERIES, tp_k_head_num=2, qk_head_dim=64, v_head_dim=64,
            scaling=0.1, sliding_window_size=-1,
        )  # fmt: skip
        weights = torch.zeros(CHANNELS, 1, WINDOW + 1, dtype=torch.bfloat16)
        given = {"bias": None, "activation": "silu"}
        if dense:
            self.mixer = module(
                "RadixLinearAttention", num_v_heads=HEADS, num_k_heads=KEY_HEADS, conv_weights=weights[:, 0], **given
            )
        else:
            held = module("Conv", weight=weights, bias=None)
            self.mixer = module(
                "MambaMixer2", n_groups=2 * KEY_HEADS, tp_size=2, num_heads=2 * HEADS, intermediate_size=96,
                conv1d=held, **given,
            )  # fmt: skip
        self.model = torch.nn.ModuleList([self.attention, self.mixer])
        self.frequencies = torch.ones(16, dtype=torch.float64), False

    def warm(self) -> None:
        warm(self.store, self.model, self.kv, LAYERS, self.temporal, self.by_channel, self.frequencies, 8192)

    def run(self, prompts: list[SegmentedPrompt], slots: Tensor) -> None:
        """The kernels of one pass over all of `prompts`."""
        total = [len(prompt.ids) for prompt in prompts]
        made = []
        for row, prompt in enumerate(prompts):
            assert prompt.begin(0, total[row], Limits(10_000, 10_000), self.index, 0.0) is not None
            made.append(Composed(row, prompt.commit(self.index), prompt.ids, torch.tensor(row), row))
        batch = build([0] * len(made), total, made, CONTEXT, WINDOW, CPU)
        table = torch.zeros(len(made), CONTEXT, dtype=torch.int32)
        passed = AttentionPass(batch, self.store.kv, self.kv, LAYERS, slots[: sum(total)], table, self.frequencies)
        passed.copy_early()
        q, k, v = (torch.zeros(len(batch.take), heads * 64, dtype=torch.bfloat16) for heads in (QUERIES, 2, 2))
        passed.run(self.attention, q, k, v)
        self._convolution(batch)
        self._recurrence(batch)

    def _convolution(self, batch: PassBatch) -> None:
        rows, tokens = batch.linear.wide_lengths, len(batch.linear.tokens)
        before, behind = (0, 0) if self.store.shapes.dense else (48, HEADS)  # in a projection
        x = torch.zeros(tokens, before + CHANNELS + behind, dtype=torch.bfloat16)[:, before : before + CHANNELS]
        windows = torch.zeros(len(rows), CHANNELS, WINDOW, dtype=torch.bfloat16)
        linear.convolved(linear.convolution(""), self.mixer, x, windows, batch.linear.wide.int(), rows)

    def _recurrence(self, batch: PassBatch) -> None:
        operators = None if batch.making is None else Operators(batch.making, 1, lambda stay: None)
        tokens = len(batch.linear.tokens)
        k = torch.zeros(tokens, self.key_heads, SIZE)
        g = torch.zeros(tokens, HEADS, *[SIZE] * self.by_channel)
        beta = torch.zeros(tokens, HEADS) if self.store.shapes.dense else None
        pools = Pools(torch.zeros(0), self.temporal)
        LinearPass(batch, None, CPU, operators)._run(
            self.store.layers[0], pools, k, k, torch.zeros(tokens, HEADS, SIZE), g, beta
        )


def prompt(tokens: int, *ranges: tuple[int, int]) -> SegmentedPrompt:
    return SegmentedPrompt(array("q", range(tokens)), ranges, Seams(8, WINDOW), Identity("test", 8, 8))


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
@pytest.mark.parametrize("family", ["delta", "kda", "mamba2"])
def test_nothing_is_compiled_in_the_middle_of_serving(family: str, stored: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(attention, "is_by_row", lambda q, window: False)  # on a GPU only latents are
    monkeypatch.setattr(linear, "convolution", lambda _: causal_conv1d_triton.causal_conv1d_fn)
    server = Server(family, stored)
    with ahead_of_time.compiling_for(90) as launches:
        server.warm()
        warmed = {id(kernel): name for name, _, kernel in launches}
        del launches[:]
        slots = torch.arange(CONTEXT)
        server.run([prompt(300, (30, 130))], slots)  # one that is made
        server.run([prompt(301, (30, 130))], slots)  # the same, jumped over
        server.run([prompt(333, (40, 140)), prompt(300, (30, 130), (130, 250))], slots[1:])
        server.run([prompt(2500, (40, 140))], slots)  # a text of several parts
        monkeypatch.setattr(stages, "_TURN_ELEMENTS", 1)  # one head after the other, where there is no memory for all
        server.run([prompt(302, (30, 130))], slots)
        for documents in (2, 3, 5, 40):  # rows, and so windows of the convolution
            server.run([prompt(67 * documents, *((67 * n, 67 * n + 67) for n in range(documents)))], slots)
    names = {name for name, *_ in launches}
    assert names >= {"attend_kernel", "join_kernel", "rerotate_scatter_kernel", "chunk_h_jump_kernel"}
    assert names >= {
        "_causal_conv1d_fwd_kernel",
        "advance_kernel",
        "copy_kernel" if stored == "bfloat16" else "quantise_kernel",
    }
    assert {name for name, _, kernel in launches if id(kernel) not in warmed} == set()


@pytest.mark.parametrize("stored", ["float32", "int8"])
@pytest.mark.parametrize("family", ["delta", "kda", "mamba2"])
def test_warming_changes_nothing(family: str, stored: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(linear, "convolution", lambda _: lambda x, *args, **named: torch.zeros_like(x))
    server = Server(family, stored)
    held = [server.store.buffer, server.temporal, *server.kv.get_kv_buffer(3)]
    before = [whole(each).random_(1, 100).clone() for each in held]
    server.warm()
    assert all(torch.equal(whole(each), was) for each, was in zip(held, before, strict=True))
