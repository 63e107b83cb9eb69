"""Further states of a prefill of Qwen4-Exp, in the pools that SGLang keeps beside that of the states.

They are the last tokens and, of each layer with an embedding of n-grams, the last inputs of its convolution. SGLang
copies them with a state and saves those of the one position that it tracks. Ours are cut out of what the pass runs
over, so a state counts as written only once the pass has: inside a CUDA graph nothing of this runs.
"""

from __future__ import annotations

from typing import Any

from sglang_hybrid.engine.cache.passes import forward


def save_inputs(_: Any, layer: Any, x: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of the convolution of Qwen4ExpPLELayer, which was given x [tokens, channels]: cut the windows."""
    further = forward.further()
    if further is None or not x.shape[0]:
        return
    import torch

    states = further.pools.short_conv_layer_cache(layer.layer_id)  # [slots, channels, width]
    width = states.shape[-1]
    tokens = further.ends[:, None] + torch.arange(-width, 0, device=x.device)
    states[further.slots] = x[tokens].transpose(1, 2).to(states.dtype)


def save_tokens(_: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of _commit_ple_batch, behind all layers: keep the last tokens, and count the states as written.

    `batch` has the tokens of each request, [requests, history + tokens], behind those of its history.
    """
    further = forward.further()
    if further is None or batch is None or batch.ngram_context is None:
        return
    import torch

    context = batch.ngram_context
    columns = torch.arange(context.shape[1] - batch.row_width, device=context.device)
    kept = context[further.rows[:, None], further.offsets[:, None] + columns]
    further.pools.set_ngram_context(further.slots, kept)
    forward.saved_further()
