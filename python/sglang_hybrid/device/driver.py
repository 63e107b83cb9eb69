"""What a backing asks of the machine: reserve addresses, create physical granules, map, unmap, give back."""

from collections.abc import Sequence
from typing import Protocol


class Driver(Protocol):
    """Virtual memory of one device. Handles are opaque; sizes and addresses are multiples of `granularity_bytes`.

    Errors: PoolExhausted for out of memory, ConfigError for what the machine or its settings cannot do, InvariantError
    for a call against the rules.
    """

    name: str
    creates_zeros: bool
    """Whether memory that was just created reads zero."""

    @property
    def granularity_bytes(self) -> int:
        """Smallest mapping unit."""
        ...

    def bind(self) -> None:
        """Make the device current on the calling thread; every thread but the one that made the driver calls it."""
        ...

    def available_bytes(self) -> int:
        """Physical memory that could be had now."""
        ...

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses without memory, aligned as the device maps best; the first address."""
        ...

    def free_reservation(self, address: int, size_bytes: int) -> None:
        """Give reserved addresses back; nothing may be mapped there."""
        ...

    def create(self, size_bytes: int) -> int:
        """Physical memory of `size_bytes`; slow, hence pooled."""
        ...

    def reclaim(self) -> bool:
        """Have other caches of this process give back what they keep unused; whether any memory came of it."""
        ...

    def release(self, handle: int, size_bytes: int) -> None:
        """Give unmapped physical memory back to the system."""
        ...

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """Put the memory of `handle` behind reserved addresses; not yet accessible."""
        ...

    def allow(self, address: int, size_bytes: int) -> None:
        """Make a contiguous mapped range readable and writable."""
        ...

    def zero(self, addresses: Sequence[int], size_bytes: int) -> None:
        """Write zeros over accessible granules of `size_bytes`, before any work that is given to the device later."""
        ...

    def unmap(self, address: int, size_bytes: int, handle: int) -> None:
        """Take one mapped handle away from its addresses; the memory stays in the handle."""
        ...

    def synchronize(self) -> None:
        """Wait until no running work can touch memory about to be unmapped."""
        ...
