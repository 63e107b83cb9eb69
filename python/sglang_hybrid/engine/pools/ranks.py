"""Tensor-parallel ranks decide alike: same requests, same pages, and growth that succeeds on all of them or on none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_hybrid.core.errors import ConfigError, InvariantError


class Group:
    """The ranks of a torch.distributed `group` of processes; one reduction of a few integers per question."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def agree(self, success: bool, account: Sequence[int]) -> bool:
        """See Agreement. Ranks that count differently would hand out other pages: better to say so than to go on."""
        least, most = self._extremes([int(success), *account])
        if least[1:] != most[1:]:
            raise InvariantError(f"ranks disagree about memory, between {least[1:]} and {most[1:]}: {list(account)}")
        return bool(least[0])

    def least(self, count: int) -> int:
        """The least `count` of all ranks."""
        return self._extremes([count])[0][0]

    def most(self, counts: Sequence[int]) -> list[int]:
        """The largest of all ranks for each of `counts`."""
        return self._extremes(counts)[1]

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank, and how many there are."""
        return torch.distributed.get_rank(self._group), torch.distributed.get_world_size(self._group)

    def gathered(self, value: bytes) -> list[bytes]:
        """The `value` of every rank, in their order."""
        found = [b""] * torch.distributed.get_world_size(group=self._group)
        torch.distributed.all_gather_object(found, value, group=self._group)
        return found

    def require_same(self, what: str, values: Sequence[int]) -> None:
        """Raise ConfigError on every rank if `values` differ between them."""
        least, most = self._extremes(values)
        if least != most:
            raise ConfigError(f"give every rank the same {what}, they have {least} to {most}: {list(values)}")

    def _extremes(self, values: Sequence[int]) -> tuple[list[int], list[int]]:
        both = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64)
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return both[: len(values)].tolist(), (-both[len(values) :]).tolist()


def of_this_server() -> Group | None:
    """The ranks that serve the same requests, those of a group of data-parallel attention; None if there is one."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return Group(parallel.attn_tp_group.cpu_group) if parallel.attn_tp_size > 1 else None
