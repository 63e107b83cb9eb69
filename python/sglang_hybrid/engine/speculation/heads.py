"""A model's own head whose prefill SGLang would run without what the head is fed.

A prefill's CUDA graph holds the layers alone. The heads of Qwen3-Next and Qwen3.5 project embeddings and hidden states
in front of them and hand the result over as input embeddings, but the graph was captured with embeddings of tokens. A
replay reads what it is handed only where it has a place for it, and models of text alone have none (SGLang 0.5.17 to
0.5.23). Answers stay right, and guesses are poor: 2.18 tokens per verification on an H200, where such questions give
3.23 on a CPU, without graphs.
"""

from __future__ import annotations

from typing import Any

_PROJECTION = "fc"
"""How SGLang calls it, in front of the layers in these heads and among them in those of EAGLE."""


def loses_input(runner: Any) -> bool:
    """Whether a replay of `runner`, a PrefillCudaGraphRunner, drops what a head hands to its layers."""
    model, layers = runner.model_runner, getattr(runner, "layer_model", None)
    if not model.is_draft_worker or layers is None or runner.buffer_registry.has_slot("input_embeds"):
        return False
    return hasattr(model.model, _PROJECTION) and not hasattr(layers, _PROJECTION)
