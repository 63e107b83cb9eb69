"""Attention of a draft model, which SGLang has no backend for where attention is `torch_native`.

A draft model guesses step by step: in every step it decodes one token for each of the `topk` branches of a request.
The draft has to be a model of attention alone, as the heads of Qwen3-Next and Qwen3.5 are.
"""

from __future__ import annotations

from typing import Any

import torch

NAME = "torch_native"


def decode_backend(factory: Any) -> Any:
    """REPLACE hook of DraftBackendFactory.create_decode_backend; None where one step needs no plan."""
    if factory.speculative_num_steps <= 1:
        return None
    backend = _steps_type()(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)
    for each in (backend, *backend.attn_backends):
        each.prefill_attention_backend_str = each.decode_attention_backend_str = NAME
    return backend


def extend_backend(factory: Any) -> Any:
    """REPLACE hook of DraftBackendFactory.create_draft_extend_backend."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    backend = TorchNativeAttnBackend(factory.draft_model_runner)
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = NAME
    return backend


def _steps_type() -> Any:
    """The class, made when SGLang's is there to extend."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class Step(TorchNativeAttnBackend):
        """One step: row r of `table` holds the KV slots of branch r, `lens` how many it sees."""

        table: Any = None
        lens: Any = None

        def _run_sdpa_forward_decode(
            self, query: Any, output: Any, k: Any, v: Any, table: Any, rows: Any, lens: Any, *rest: Any, **named: Any
        ) -> Any:
            branches = torch.arange(len(self.lens))
            return super()._run_sdpa_forward_decode(
                query, output, k, v, self.table, branches, self.lens, *rest, **named
            )

    class Steps:
        """What a draft worker plans once for all steps of a round."""

        def __init__(self, runner: Any, topk: int, steps: int) -> None:
            self.topk, self.steps = topk, steps
            self.attn_backends = [Step(runner) for _ in range(steps - 1)]

        def init_forward_metadata(self, forward_batch: Any) -> None:
            """Branch t of a request sees the prefix and what it wrote itself: `steps` slots behind t * steps."""
            pool = self.attn_backends[0].req_to_token_pool.req_to_token
            requests, lens, width = forward_batch.req_pool_indices, forward_batch.seq_lens.tolist(), self.steps
            table = pool[requests].repeat_interleave(self.topk, 0)
            for request, prefix in enumerate(lens):
                for branch in range(1, self.topk):
                    own = pool[requests[request], prefix + branch * width : prefix + (branch + 1) * width]
                    table[request * self.topk + branch, prefix : prefix + width] = own
            for step, backend in enumerate(self.attn_backends):
                backend.table = table
                backend.lens = forward_batch.seq_lens.repeat_interleave(self.topk) + step + 1

    return Steps
