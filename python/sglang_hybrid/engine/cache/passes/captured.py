"""No CUDA graph of a prefill around recurrent layers that SGLang does not leave out of it.

Where the launcher knows the model, it starts SGLang without such graphs (`launch.graphs`). A name of the hub, and
SGLang's own launcher with this package as its plug-in, come here with them.
"""

from __future__ import annotations

import logging
from typing import Any

_BOTH = {"RadixAttention", "MambaMixer2"}

logger = logging.getLogger(__name__)


def leave_out(layers: Any, model: Any) -> Any:
    """AFTER hook of compute_attention_and_moe_layers: which layers of `model` run between the pieces of such a graph.

    A layer with attention and Mamba-2 side by side counts for its attention alone. Without any that count SGLang
    captures nothing, and prefills as it does with all models of which it does not know every layer.
    """
    held = model.layers.values() if hasattr(model.layers, "values") else model.layers
    if not any({type(part).__name__ for part in layer.children()} >= _BOTH for layer in held):
        return None
    logger.warning(
        "prefills run without CUDA graphs, as with --cuda-graph-backend-prefill disabled: SGLang would capture the "
        "Mamba-2 layers of this model in them, and the first request would end the server or be answered wrongly"
    )
    return layers._replace(attention_layers=[], mha_companion_layers=[])
