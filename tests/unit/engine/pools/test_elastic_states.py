"""Kernels over elastic memory: Mamba-2 convolves with the one whose offsets have 64 bits, and none touches the last
slot or a page of another request, which have addresses only."""

from __future__ import annotations

import importlib
import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.pools import hooks
from sglang_hybrid.engine.surface.hooks import HOOKS

LIMIT = 2**32
"""Elements that the compiled convolution can address."""


class Backend:
    """A Mamba-2 backend whose compiled convolution computes the window of a slot in 32 bits, as SGLang's does."""

    def __init__(self, slot_elements: int) -> None:
        self.slot_elements = slot_elements
        self.written: list[int] = []

    def forward(
        self,
        mixer: Any,
        hidden_states: Any,
        output: Any,
        layer_id: int,
        forward_batch: Any,
        mup_vector: Any = None,
        use_triton_causal_conv: bool = False,
    ) -> None:
        offset = forward_batch.slot * self.slot_elements
        self.written.append(offset if use_triton_causal_conv else offset % LIMIT)


def hook(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, theirs: str, by: str = ".") -> None:
    """Wrap a method of `owner` as SGLang wraps that of its class `theirs`, by the row of the list."""
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    from sglang_hybrid.engine.surface.registration import _ours

    (row,) = [row for row in HOOKS if row.target.endswith(f"{theirs}{by}{name}") and row.when == "elastic"]
    monkeypatch.setattr(owner, name, _wrap_fn(getattr(owner, name), _ours(row.function), HookType[row.how]))


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> type[Backend]:
    hook(monkeypatch, Backend, "forward", "Mamba2AttnBackend")
    return Backend


@pytest.mark.parametrize("asked", [{}, {"use_triton_causal_conv": False}, {"use_triton_causal_conv": True}])
def test_no_window_of_another_slot_is_written(hooked: type[Backend], asked: dict[str, bool]) -> None:
    """Falcon-H1 34B: 300 million elements from one state to the next, so slot 28 is past the limit."""
    backend, batch = hooked(300_000_000), SimpleNamespace(slot=28)
    backend.forward(None, torch.empty(0), None, layer_id=3, forward_batch=batch, mup_vector=None, **asked)
    assert backend.written == [28 * 300_000_000]


def test_sglangs_backend_has_the_argument() -> None:
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend

    given, expected = (inspect.signature(each.forward).parameters for each in (Mamba2AttnBackend, Backend))
    assert list(given) == list(expected)


class Kernel:
    """FlashInfer's gated delta rule on Hopper, as far as it chooses slots."""

    def decode(self, q: Any, *, ssm_states: Any, cache_indices: Any, **rest: Any) -> torch.Tensor:
        return torch.arange(len(ssm_states))[cache_indices]

    def extend(self, q: Any, *, ssm_states: Any, cache_indices: Any, **rest: Any) -> torch.Tensor:
        return torch.where(cache_indices >= 0, cache_indices, len(ssm_states) - 1)


@pytest.mark.parametrize("name", ["decode", "extend"])
def test_padding_is_of_the_slot_that_has_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from sglang.srt.layers.attention.linear.kernels.gdn_flashinfer import FlashInferGDNKernel

    given = inspect.signature(getattr(FlashInferGDNKernel, name)).parameters["cache_indices"]
    assert given.kind is inspect.Parameter.KEYWORD_ONLY
    indices, states = torch.tensor([4, -1, 2]), torch.zeros(9)
    assert getattr(Kernel(), name)(None, ssm_states=states, cache_indices=indices).tolist() == [4, 8, 2]
    hook(monkeypatch, Kernel, name, "FlashInferGDNKernel")
    assert getattr(Kernel(), name)(None, ssm_states=states, cache_indices=indices).tolist() == [4, 0, 2]


class Tables:
    """As TensorRT-LLM's attention has its table of pages filled: what a prompt has, and nothing behind it."""

    @staticmethod
    def fill(*, page_table: torch.Tensor | None, lengths: list[int], page_size: int) -> None:
        for row, length in enumerate(lengths) if page_table is not None else ():
            pages = -(-length // page_size)
            assert page_table is not None
            page_table[row, :pages] = torch.arange(10, 10 + pages)


@pytest.mark.parametrize("name", ["build_trtllm_mha_page_table", "update_trtllm_mha_graph_metadata"])
def test_no_page_of_another_request_is_named_behind_a_prompt(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    backend = importlib.import_module("sglang.srt.layers.attention.trtllm_mha_backend")
    assert "page_table" in inspect.signature(getattr(backend, name)).parameters
    calls = re.findall(rf"\b{name}\(\s*(\w+)=", inspect.getsource(backend))
    assert calls, "given by name"
    table = torch.full((2, 4), 99, dtype=torch.int32)
    Tables.fill(page_table=table, lengths=[64, 130], page_size=64)
    assert table.tolist() == [[10, 99, 99, 99], [10, 11, 12, 99]]
    monkeypatch.setattr(Tables, name, staticmethod(Tables.fill), raising=False)
    hook(monkeypatch, Tables, name, "trtllm_mha_backend", by=":")
    getattr(Tables, name)(page_table=table, lengths=[64, 130], page_size=64)
    assert table.tolist() == [[10, 0, 0, 0], [10, 11, 12, 0]]
    getattr(Tables, name)(page_table=None, lengths=[64], page_size=64)


def test_prefills_that_copy_the_whole_pool_are_refused() -> None:
    module = importlib.import_module("sglang.srt.layers.attention.trtllm_mha_backend")
    whole = "paged_kv = torch.stack([k_cache, v_cache], dim=1)" in inspect.getsource(module)
    (row,) = [row for row in HOOKS if row.function == "pools.hooks:whole_copies"]
    assert whole == row.holds(compat.engine_version())
    chosen = SimpleNamespace(prefill_attention_backend_str="trtllm_mha")
    other = SimpleNamespace(prefill_attention_backend_str="fa3")
    with pytest.raises(ConfigError, match=r"copies the whole pool .* --prefill-attention-backend triton"):
        hooks.whole_copies(None, SimpleNamespace(use_fmha_v2=True), chosen)
    hooks.whole_copies(None, SimpleNamespace(use_fmha_v2=True), other)  # it decodes only
    hooks.whole_copies(None, SimpleNamespace(use_fmha_v2=False), chosen)
