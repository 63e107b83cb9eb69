"""Physical memory behind reserved address ranges, as a contract, and the backing that only keeps the books."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from sglang_hybrid.core.errors import InvariantError, PoolExhausted


class Run(NamedTuple):
    """`length` consecutive granules of one plane, from granule `first`."""

    plane: int
    first: int
    length: int

    def granules(self) -> Iterator[tuple[int, int]]:
        """(plane, granule) one by one."""
        return ((self.plane, self.first + offset) for offset in range(self.length))


class Backing(Protocol):
    """Physical memory behind a reserved range (design: one contract, CUDA, host and bookkeeping behind it).

    Both calls are atomic: they do all of it, or raise and leave everything as it was. Mapping what is mapped or
    unmapping what is not is an InvariantError before anything is touched. `map` raises PoolExhausted when memory runs
    out. A granule that was just mapped reads zero, although physical memory is recycled.
    """

    def map(self, runs: Sequence[Run]) -> None:
        """Back every granule of `runs` with physical memory."""
        ...

    def unmap(self, runs: Sequence[Run]) -> None:
        """Take the physical memory of every granule of `runs` away; the addresses stay reserved."""
        ...

    def trim(self, keep: int) -> int:
        """Give pooled physical granules back to the system except `keep`; return how many were given back."""
        ...


def count_granules(runs: Sequence[Run]) -> int:
    """Granules in `runs`."""
    return sum(run.length for run in runs)


class LedgerBacking:
    """A backing without memory: for simulation, and the reference the real ones are tested against.

    `capacity` is the number of granules the imaginary machine has; None means no end.
    """

    def __init__(self, plane_granules: Sequence[int], capacity: int | None = None) -> None:
        self.plane_granules = tuple(plane_granules)
        self.capacity = capacity
        self.mapped: set[tuple[int, int]] = set()

    def map(self, runs: Sequence[Run]) -> None:
        """See Backing."""
        wanted = [granule for run in runs for granule in run.granules()]
        require_unmapped(wanted, self.mapped, self.plane_granules)
        if self.capacity is not None and len(self.mapped) + len(wanted) > self.capacity:
            raise PoolExhausted(f"the machine has no more granules; lower the budget: {self.capacity}")
        self.mapped.update(wanted)

    def unmap(self, runs: Sequence[Run]) -> None:
        """See Backing."""
        unwanted = [granule for run in runs for granule in run.granules()]
        require_mapped(unwanted, self.mapped)
        self.mapped.difference_update(unwanted)

    def trim(self, keep: int) -> int:
        """See Backing; nothing is pooled."""
        return 0


Granule = tuple[int, int]


def require_unmapped(
    wanted: Sequence[Granule], mapped: set[Granule] | dict[Granule, int], sizes: Sequence[int]
) -> None:
    """Raise InvariantError unless all `wanted` are distinct, inside their plane, and not mapped."""
    if len(set(wanted)) != len(wanted):
        raise InvariantError(f"a granule is named twice in one call: {len(wanted) - len(set(wanted))} times")
    for plane, index in wanted:
        if not (0 <= plane < len(sizes) and 0 <= index < sizes[plane]):
            raise InvariantError(f"a granule lies outside the reserved ranges: {(plane, index)}")
        if (plane, index) in mapped:
            raise InvariantError(f"a granule is mapped already: {(plane, index)}")


def require_mapped(unwanted: Sequence[Granule], mapped: set[Granule] | dict[Granule, int]) -> None:
    """Raise InvariantError unless all `unwanted` are distinct and mapped."""
    if len(set(unwanted)) != len(unwanted):
        raise InvariantError(f"a granule is named twice in one call: {len(unwanted) - len(set(unwanted))} times")
    for granule in unwanted:
        if granule not in mapped:
            raise InvariantError(f"a granule is not mapped: {granule}")
