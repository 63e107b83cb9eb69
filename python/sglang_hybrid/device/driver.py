"""What a backing asks of the machine: reserve addresses, create physical granules, map, unmap, give back."""

from typing import Protocol


class Driver(Protocol):
    """Virtual memory of one device. Handles are opaque; sizes and addresses are multiples of `granularity_bytes`.

    Errors: PoolExhausted for out of memory, ConfigError for what the machine or its settings cannot do, InvariantError
    for a call against the rules.
    """

    name: str

    @property
    def granularity_bytes(self) -> int:
        """Smallest mapping unit."""
        ...

    def available_bytes(self) -> int:
        """Physical memory that could be had now."""
        ...

    def reserve(self, size_bytes: int, alignment_bytes: int) -> int:
        """Reserve addresses without memory; the first address."""
        ...

    def free_reservation(self, address: int, size_bytes: int) -> None:
        """Give reserved addresses back; nothing may be mapped there."""
        ...

    def create(self, size_bytes: int) -> int:
        """Physical memory of `size_bytes`; slow, hence pooled. Its contents are unspecified."""
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

    def unmap(self, address: int, size_bytes: int, handle: int) -> None:
        """Take one mapped handle away from its addresses; the memory stays in the handle."""
        ...

    def synchronize(self) -> None:
        """Wait until no running work can touch memory about to be unmapped."""
        ...
