"""A device that is sets on paper, for machines that run over the real backing."""

import itertools

from sglang_hybrid.core.errors import PoolExhausted
from sglang_hybrid.memory.columns import UNMAPPED
from sglang_hybrid.memory.pool import Pool

GRANULE = 1024


def mapped_granules(pool: Pool, first_plane: int) -> set[tuple[int, int]]:
    """(plane, granule) under every column of `pool` that is WARM or LIVE, from the layout alone."""
    found = set()
    for planes in pool.layout.planes:
        for column, state in enumerate(pool.columns.state):
            if state != UNMAPPED:
                span = range(*pool.layout.span(planes, column))
                found |= {(first_plane + plane, granule) for plane in range(planes.count) for granule in span}
        first_plane += planes.count
    return found


class PaperDriver:
    """Driver rules on paper: sets of reserved ranges, handles and mappings; one call can be told to fail."""

    name = "paper"
    granularity_bytes = GRANULE
    creates_zeros = True

    def __init__(self):
        self.used = set()  # handles with bytes of somebody
        self.handles, self.mapped, self.reserved = set(), {}, {}
        self.failing = None
        self._ids, self._addresses = itertools.count(1), itertools.count(1 << 20, 1 << 20)

    def _maybe_fail(self, method):
        if self.failing and self.failing[0] == method:
            left = self.failing[1]
            self.failing = (method, left - 1) if left else None
            if not left:
                raise PoolExhausted(f"injected into {method}: 0")

    def available_bytes(self):
        return 1 << 40

    def reserve(self, size_bytes):
        address = next(self._addresses)
        self.reserved[address] = size_bytes
        return address

    def free_reservation(self, address, size_bytes):
        assert self.reserved.pop(address) == size_bytes
        assert not any(address <= at < address + size_bytes for at in self.mapped)

    def create(self, size_bytes):
        self._maybe_fail("create")
        handle = next(self._ids)
        self.handles.add(handle)
        return handle

    def release(self, handle, size_bytes):
        assert handle not in self.mapped.values()
        self.handles.remove(handle)

    def map(self, address, size_bytes, handle):
        self._maybe_fail("map")
        assert handle in self.handles
        assert handle not in self.mapped.values()
        assert address not in self.mapped
        self.mapped[address] = handle

    def allow(self, address, size_bytes):
        self._maybe_fail("allow")
        assert all(at in self.mapped for at in range(address, address + size_bytes, GRANULE))

    def zero(self, addresses, size_bytes):
        self._maybe_fail("zero")
        self.used -= {self.mapped[address] for address in addresses}

    def unmap(self, address, size_bytes, handle):
        assert self.mapped.pop(address) == handle
        self.used.add(handle)

    def reclaim(self):
        return False

    def synchronize(self):
        pass
