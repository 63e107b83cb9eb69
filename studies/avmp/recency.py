"""Who allocated last, per pool: the released allocators evict the request that has not allocated for longest."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray


class Recency:
    """Requests in order of their last allocation, each with everything it was given, in order."""

    def __init__(self) -> None:
        self._given: OrderedDict[int, list[NDArray[np.uint32]]] = OrderedDict()

    def touch(self, request_id: int, handles: NDArray[np.uint32]) -> None:
        """Record that `request_id` was just given `handles`."""
        self._given.setdefault(request_id, []).append(handles)
        self._given.move_to_end(request_id)

    def oldest(self) -> tuple[int, NDArray[np.uint32]] | None:
        """Remove and return the least recent request with its handles; None if there is none."""
        if not self._given:
            return None
        request_id, given = self._given.popitem(last=False)
        return request_id, np.concatenate(given)

    def drop(self, request_id: int) -> None:
        """Forget `request_id`."""
        self._given.pop(request_id, None)
