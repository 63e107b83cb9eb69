"""How much memory a path would take on a GPU: what its tensors on torch's meta device hold at the worst moment."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Inside, `bytes` is the most that was held at once by tensors that were made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self._held = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (key := self._key(x)) not in given | self._known:
                storage = x.untyped_storage()
                self._known.add(key)
                self._held += storage.nbytes()
                self.bytes = max(self.bytes, self._held)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return result

    @staticmethod
    def _key(x: torch.Tensor) -> int:
        return x.untyped_storage()._cdata

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._held -= size
