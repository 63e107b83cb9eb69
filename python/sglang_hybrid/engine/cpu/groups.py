"""Mamba-2 with one group of B and C on several ranks: each rank has the group, and the weights have it once.

On a CPU SGLang takes weights that are smaller than all ranks' shares together for heads that it has to pad with zeros,
as those of Qwen3-Next, and ends on their shapes while it loads Falcon-H1 or Granite (0.5.17 to 0.5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Shard = tuple[int, int, bool]
"""Rows over all ranks, those of them that are copies, and whether each rank has the same."""

Loader = Callable[[Tensor, Tensor], None]


def load_copies(original: Callable[..., Loader], shards: Sequence[Shard], ranks: int, rank: int) -> Loader:
    """AROUND hook of mamba_v2_sharded_weight_loader: where there are copies, load as on a GPU."""
    if not any(copies for _, copies, _ in shards):
        return original(shards, ranks, rank)

    def load(parameter: Tensor, weight: Tensor) -> None:
        to = begin = 0
        for rows, copies, same in shards:
            share, there = rows // ranks, rows - copies
            at = begin + (0 if same else rank * share)
            parameter.data[to : to + share] = weight[at : at + share]
            to, begin = to + share, begin + there

    return load
