"""A model's own head that drafts, behind a pass with composed prompts.

A head has KV for every token of a prompt, made of the model's hidden state there. A pass that reuses interiors has no
hidden states of them, so their entries keep the head's KV as well: for the rows of a composed pass the head is one more
attention layer, over the same tokens at the same positions. What it drafts is verified, so answers do not depend on
it; how many drafts are accepted does. SGLang calls the head's backend directly; for the pass another takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_hybrid.engine.segments import forward
from sglang_hybrid.engine.segments.attention import AttentionPass


class HeadAttention:
    """The attention backend of the head's `runner` in the pass behind `now`; plain requests stay with its own."""

    def __init__(self, now: forward.Running, runner: Any) -> None:
        self._now, self._runner, self._own = now, runner, runner.attn_backend
        self._pass: AttentionPass | None = None
        self._plain: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Copy the head's KV of interiors, and plan what SGLang runs."""
        now, own = self._now, self._own
        if now.batch.plain_rows:
            self._plain = forward.plain(forward_batch, now.batch, self._runner)
            own.init_forward_metadata(self._plain)
        self._pass = now.attention_pass(own, now.composer.store.head_kv, _layers(own.token_to_kv_pool))

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """Attention of one layer of the head."""
        assert self._pass is not None, "it is planned before it runs"

        def run(*tensors: Any, **named: Any) -> Any:
            return self._own.forward(*tensors, layer, self._plain, save_kv_cache, **named)

        by_sglang = None if self._plain is None else run
        return forward.attended(self._pass, by_sglang, layer, (q, k, v), save_kv_cache, kwargs)


def _layers(pool: Any) -> list[int]:
    """The head's attention layers, by SGLang's numbers; its pool is one of a hybrid model or one of attention alone."""
    if hasattr(pool, "full_attention_layer_id_mapping"):
        return sorted(pool.full_attention_layer_id_mapping)
    first = pool.start_layer or 0
    return list(range(first, first + pool.layer_num))


def draft(
    original: Callable[..., Any], worker: Any, batch: Any, hidden: Any, tokens: Any, embeds: Any = None, **kwargs: Any
) -> Any:
    """AROUND hook of EagleDraftWorker._draft_extend_for_prefill: the head's pass behind a prefill."""
    now = forward.last(batch)
    if now is None:
        return original(worker, batch, hidden, tokens, embeds, **kwargs)
    if embeds is not None:
        # Of the short stream, which SGLang would cut by the lengths of its own. Behind a row whose next token is
        # jumped over this is the embedding of another; prompts with images have no such rows.
        now.embeds = torch.cat([embeds[1:], embeds[-1:]])
    runner = worker.draft_runner
    own = runner.attn_backend
    runner.attn_backend = HeadAttention(now, runner)
    try:
        return original(worker, batch, hidden, tokens, None, **kwargs)
    finally:
        runner.attn_backend = own
