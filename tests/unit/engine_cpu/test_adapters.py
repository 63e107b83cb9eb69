"""Adapters of the output head: each row gets its request's, whichever rows of a prefill the head sees."""

from types import SimpleNamespace

import pytest
import torch

from sglang_hybrid.engine.cpu.adapters import by_head_rows, note_head_rows
from sglang_hybrid.engine.cpu.pinning import without_pinning

HIDDEN, VOCABULARY, RANK, ADAPTERS = 6, 11, 2, 3
SCALE = 1.5


class Mode(SimpleNamespace):
    """The kind of a pass, as SGLang's LoRA code asks for it."""

    def __getattr__(self, name):
        return lambda: name == f"is_{self.kind}"


def batch(kind, lens, logprob_from=None):
    return SimpleNamespace(
        forward_mode=Mode(kind=kind),
        batch_size=len(lens),
        extend_seq_lens=torch.tensor(lens, dtype=torch.int32),
        extend_seq_lens_cpu=lens,
        return_logprob=logprob_from is not None,
        extend_logprob_start_lens_cpu=logprob_from,
        spec_info=None,
    )


@pytest.fixture
def backend():
    """SGLang's, with our hooks around it."""
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend

    return TorchNativeLoRABackend(ADAPTERS, torch.device("cpu"))


def prepare(backend, forward_batch, which):
    """What SGLang does before a pass, with adapter 0 as none."""
    told = {"forward_batch": forward_batch, "weight_indices": which}
    without_pinning(
        backend.prepare_lora_batch,
        **told,
        lora_ranks=[0, RANK, RANK],
        scalings=[0.0, SCALE, SCALE],
        use_cuda_graph=False,
    )
    note_head_rows(None, backend, **told)


def said(backend, hidden, down, up, info):
    """The adapters' part of logits, by the two calls of SGLang's head."""
    low = by_head_rows(type(backend).run_lora_a_sgemm, backend, hidden, down, pruned_batch_info=info)
    return by_head_rows(
        type(backend).run_lora_b_sgemm,
        backend,
        x=low,
        weights=up,
        output_offset_cpu=torch.tensor([0, VOCABULARY]),
        base_output=torch.zeros(len(hidden), VOCABULARY),
        pruned_batch_info=info,
    )


@pytest.mark.parametrize(
    ("lens", "logprob_from", "rows"),
    [([5, 3, 4, 1], None, [1, 1, 1, 1]), ([5, 3, 4, 1], [2, 3, 0, 0], [3, 1, 4, 1])],
    ids=["last tokens", "log-probabilities"],
)
def test_rows_of_a_prefill_get_the_adapter_of_their_request(backend, rng, lens, logprob_from, rows):
    which = [1, 0, 2, 1]
    prepare(backend, batch("extend", lens, logprob_from), which)
    info = backend.lm_head_batch_info
    assert info.expected_tokens == sum(rows)
    hidden = torch.randn(sum(rows), HIDDEN, generator=rng)
    down = torch.randn(ADAPTERS, RANK, HIDDEN, generator=rng)
    up = torch.randn(ADAPTERS, VOCABULARY, RANK, generator=rng)
    of_row = torch.tensor(which).repeat_interleave(torch.tensor(rows))
    wanted = SCALE * torch.einsum("rh,rkh,rvk->rv", hidden, down[of_row], up[of_row])
    wanted[of_row == 0] = 0.0
    torch.testing.assert_close(said(backend, hidden, down, up, info), wanted)
    assert backend.batch_info.seg_lens_cpu.sum() == sum(lens), "the layers go on with whole prompts"


def test_a_long_prompt_in_parts(backend, monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_LOGPROB_CHUNK", "1")
    monkeypatch.setenv("SGLANG_LOGPROB_CHUNK_SIZE", "4")
    prepare(backend, batch("extend", [5, 3], [0, 1]), [2, 1])
    parts = backend.lm_head_pass_batch_infos
    assert [part.expected_tokens for part in parts] == [4, 3]
    assert [part.weight_indices_cpu.tolist() for part in parts] == [[2], [2, 1]]
    assert [part.seg_lens_cpu.tolist() for part in parts] == [[4], [1, 2]]


def test_a_decoding_pass_behind_a_prefill_has_all_its_rows(backend):
    prepare(backend, batch("extend", [5, 3]), [2, 1])
    assert backend.lm_head_batch_info is not None
    prepare(backend, batch("decode", [1, 1]), [2, 1])
    assert backend.lm_head_batch_info is None
    assert backend.lm_head_pass_batch_infos is None


def test_an_error_leaves_the_routing_of_the_layers(backend):
    backend.batch_info = "whole"

    def fail(*args, **kwargs):
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        by_head_rows(fail, backend, pruned_batch_info="part")
    assert backend.batch_info == "whole"
