"""Further states of Qwen4-Exp beside the pool of states: those of SGLang's own layer where a prompt ends there."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.passes import forward, kernels, ngrams
from tests.unit.engine.cache.passes.test_prefill_rows import Backend, a_pass, triton
from tests.versions import since

pytestmark = since("0.5.21", "Qwen4-Exp")

HIDDEN, STREAMS, TAPS, NGRAM, LAYERS, EOS = 6, 2, 3, 4, (1, 3), 7
CHANNELS, WIDTH = HIDDEN * STREAMS, (TAPS - 1) * NGRAM


class Pools:
    """SGLang's pools beside the states, and what reads them."""

    def __init__(self) -> None:
        sides = importlib.import_module("sglang.srt.mem_cache.ple_state_pool")
        self.windows = sides.ShortConvPool(
            size=200, state_shape=(CHANNELS, WIDTH), layer_ids=list(LAYERS), dtype=torch.float32, device="cpu"
        )
        self.tokens = sides.NGramPool(size=200, context_len=NGRAM - 1, eos_token_id=EOS, device="cpu")
        self.mamba_pool = SimpleNamespace(_slot_siblings=[self.windows, self.tokens])
        self.slots = torch.tensor([[11], [12]])
        self.ple_window_cache = None

    def short_conv_layer_cache(self, layer: int) -> Any:
        return self.windows.layer_cache(layer)

    def get_ngram_context(self, slots: Any) -> Any:
        return self.tokens.get_context(slots)

    def set_ngram_context(self, slots: Any, context: Any) -> None:
        self.tokens.set_context(slots, context)

    def get_mamba_indices(self, requests: Any) -> Any:
        return self.slots[requests].flatten()


class Run:
    """SGLang's layers of n-grams over a pass of two requests, one pass after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = importlib.import_module("sglang.srt.models.qwen4_exp")
        self.pools = Pools()
        monkeypatch.setattr(self.module, "get_req_to_token_pool", lambda: self.pools)
        self.mode = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode.EXTEND
        torch.manual_seed(0)
        self.layers = [self.layer(number) for number in LAYERS]

    def layer(self, number: int) -> Any:
        layer = self.module.Qwen4ExpPLELayer.__new__(self.module.Qwen4ExpPLELayer)
        torch.nn.Module.__init__(layer)
        layer.layer_id, layer.conv_channels = number, CHANNELS
        layer.short_conv_dilation, layer.short_conv_state_len = NGRAM, WIDTH
        layer.conv1d = torch.nn.Conv1d(CHANNELS, CHANNELS, TAPS, groups=CHANNELS, bias=False)
        return layer

    def __call__(self, ids: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run all layers over `ids` and the `inputs` of their convolutions; each [tokens] and [tokens, channels]."""
        lengths = [len(one) for one in ids]
        passed = SimpleNamespace(
            tbo_parent_token_range=None, spec_algorithm=None, spec_info=None, _original_forward_mode=None,
            forward_mode=self.mode, extend_seq_lens=torch.tensor(lengths), extend_seq_lens_cpu=lengths,
            global_num_token_non_padded_cpu=None, req_pool_indices=torch.arange(len(ids)), out_cache_loc=None,
            mamba_track_indices=None, mamba_track_mask=None,
        )  # fmt: skip
        batch = self.module._prepare_ple_batch(torch.cat(ids), passed, ngram_size=NGRAM, ngram_eos_token_id=EOS)
        made = []
        with torch.no_grad():
            for layer in self.layers:
                x = torch.cat(inputs)
                made.append(layer._short_conv(x, passed, batch))
                ngrams.save_inputs(made[-1], layer, x, passed, batch)
        self.module._commit_ple_batch(batch, passed)
        ngrams.save_tokens(None, batch=batch, forward_batch=passed)
        return made

    def held(self, slot: int) -> tuple[torch.Tensor, ...]:
        windows = self.pools.windows.conv_state
        assert windows is not None
        return windows[:, slot].clone(), self.pools.tokens.get_context(torch.tensor([slot]))


LENGTHS, POSITIONS = [130, 200], [[64, 130], [128, 192]]


def prompts() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(1)
    return [torch.randint(8, 90, (n,)) for n in LENGTHS], [torch.randn(n, CHANNELS) for n in LENGTHS]


def test_what_is_kept_is_what_a_prompt_that_ends_there_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, inputs = prompts()
    run = Run(monkeypatch)
    backend = Backend("cpu", triton())
    backend.req_to_token_pool = run.pools  # type: ignore[attr-defined]
    _, written = a_pass(backend, POSITIONS, [0, 0], LENGTHS)
    further = forward.further()
    assert further is not None
    assert written == [False] * 4, "the pool has them, what lies beside it has not"
    run(ids, inputs)
    assert forward.further() is None
    assert [checkpoint.written for checkpoint in further.checkpoints] == [True] * 4
    ends = [(request, at) for request, wanted in enumerate(POSITIONS) for at in wanted]
    for slot, (request, at) in enumerate(ends, 100):
        alone = Run(monkeypatch)
        alone([ids[request][:at]], [inputs[request][:at]])
        for ours, theirs in zip(run.held(slot), alone.held(11), strict=True):
            assert torch.equal(ours, theirs), (request, at)


def test_a_prompt_goes_on_from_such_a_state_as_if_it_had_been_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, inputs = prompts()
    run = Run(monkeypatch)
    backend = Backend("cpu", triton())
    backend.req_to_token_pool = run.pools  # type: ignore[attr-defined]
    a_pass(backend, [[64], [128]], [0, 0], LENGTHS)
    whole = run(ids, inputs)
    copied = []
    pool = SimpleNamespace(mamba_cache=SimpleNamespace(temporal=torch.zeros(1, 1), conv=[]), replayssm_write_pos=None)
    pool._slot_siblings = run.pools.mamba_pool._slot_siblings

    def original(pool: Any, source: Any, destination: Any) -> None:  # as SGLang's copy_from ends
        copied.append(len(source))
        for sibling in pool._slot_siblings:
            sibling.copy_slots(source, destination)

    kernels.copy(original, pool, torch.tensor([100, 101]), torch.tensor([11, 12]))
    assert copied == [2], "our kernel copies the states alone"
    a_pass(backend, [[], []], [64, 128], [66, 72])
    rest = run([ids[0][64:], ids[1][128:]], [inputs[0][64:], inputs[1][128:]])
    for all_tokens, behind in zip(whole, rest, strict=True):
        assert torch.allclose(torch.cat([all_tokens[64:130], all_tokens[130 + 128 :]]), behind, atol=1e-6)


def test_a_window_that_begins_before_the_pass_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    backend = Backend("cpu", triton())
    backend.req_to_token_pool = run.pools  # type: ignore[attr-defined]
    a_pass(backend, [[WIDTH - 1, WIDTH], []], [0, 0], LENGTHS)
    further = forward.further()
    assert further is not None
    assert [checkpoint.position for checkpoint in further.checkpoints] == [WIDTH]


def test_what_lies_beside_a_pool_of_states_is_found() -> None:
    pools = Pools()
    assert [tuple(held.shape) for held in compat.beside_states(pools.mamba_pool)] == [
        (len(LAYERS), 201, CHANNELS, WIDTH),
        (201, NGRAM - 1),
    ]
    assert compat.beside_states(None) == compat.beside_states(SimpleNamespace()) == []
