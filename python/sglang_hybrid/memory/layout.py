"""Where the slots of a pool lie: layer-major planes over reserved address ranges, mapped in granules.

A *plane* is one tensor of one layer (K of layer 3, the recurrent state of layer 7): an array of slots in a reserved
range. A *granule* is the unit the memory system maps. A *column* is the smallest run of slots worth mapping: the same
slots in every plane of the pool. Example, Qwen3-Next at TP1 with 2 MiB granules: a KV slot takes 1 KiB in each of 24
planes, so a column is 2,048 tokens and 24 granules; a state slot takes exactly one granule in each of 36 planes, so a
column is 1 state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hybrid.core.errors import ConfigError


@dataclass(frozen=True)
class Planes:
    """`count` equal planes; `slot_bytes` is the distance between two slots of a plane."""

    name: str
    count: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.slot_bytes < 1:
            raise ConfigError(f"planes {self.name!r} need count >= 1 and slot_bytes >= 1: {self.count}")


@dataclass(frozen=True)
class Layout:
    """The planes of one pool and its reach.

    `slots` is how far the address range reaches at least (it is rounded up to whole columns), not how much memory
    there is; `page_slots` slots are allocated together (tokens of a KV page); the first `pinned_pages` pages are
    never handed out and always mapped (SGLang writes padding to slot 0). A column takes `run` granules of a plane
    whose slots are smaller. `straddle` allows slots that cross the boundary of such a run; one of them is usable only
    while both granules are mapped.
    """

    name: str
    planes: tuple[Planes, ...]
    slots: int
    granule_bytes: int = 2 << 20
    page_slots: int = 1
    pinned_pages: int = 0
    straddle: bool = False
    run: int = 1

    def __post_init__(self) -> None:
        if not self.planes:
            raise ConfigError(f"pool {self.name!r} needs at least one plane: {self.planes}")
        if min(self.granule_bytes, self.page_slots, self.run) < 1:
            raise ConfigError(f"pool {self.name!r} needs a positive granule and page: {self.granule_bytes}")
        if self.slots < self.page_slots or self.slots % self.page_slots:
            raise ConfigError(
                f"give pool {self.name!r} a multiple of {self.page_slots} slots, at least one: {self.slots}"
            )
        if not 0 <= self.pinned_pages <= self.pages:
            raise ConfigError(f"pool {self.name!r} cannot pin more pages than its {self.pages}: {self.pinned_pages}")
        for planes in self.planes:
            self._check_division(planes)

    def _check_division(self, planes: Planes) -> None:
        slot, granule = planes.slot_bytes, self.granule_bytes
        if self.straddle or slot % granule == 0 or self.run * granule % slot == 0:
            return
        padded = next((size for size in _divisors(granule) if size >= slot), -(-slot // granule) * granule)
        raise ConfigError(
            f"slots of planes {planes.name!r} cross the boundaries of a {granule}-byte granule; pad the slot to "
            f"{padded} bytes, choose another granule, or allow it with straddle=True: {slot}"
        )

    @property
    def column_slots(self) -> int:
        """Slots per column: what a run of the plane with the largest slots holds, in whole pages, at least one."""
        fitting = min(self.run * self.granule_bytes // planes.slot_bytes for planes in self.planes)
        return max(fitting // self.page_slots, 1) * self.page_slots

    @property
    def column_pages(self) -> int:
        """Pages per column."""
        return self.column_slots // self.page_slots

    @property
    def columns(self) -> int:
        """Columns that cover all slots."""
        return -(-self.slots // self.column_slots)

    @property
    def pages(self) -> int:
        """Pages of the pool: those of all columns."""
        return self.columns * self.column_pages

    @property
    def plane_granules(self) -> tuple[int, ...]:
        """Length of each plane's range in granules, plane by plane."""
        return tuple(self.span(planes, self.columns - 1)[1] for planes in self.planes for _ in range(planes.count))

    @property
    def column_granules(self) -> int:
        """Granules a column touches at most, over all planes."""
        probe = range(min(self.columns, 64))
        return max(
            sum(p.count * (stop - start) for p in self.planes for start, stop in [self.span(p, c)]) for c in probe
        )

    @property
    def exclusive(self) -> bool:
        """Whether no two columns share a granule, so that every column costs the same."""
        return all(self.column_slots * planes.slot_bytes % self.granule_bytes == 0 for planes in self.planes)

    def span(self, planes: Planes, column: int) -> tuple[int, int]:
        """First granule and one past the last that `column` touches in each plane of `planes`."""
        column_bytes = self.column_slots * planes.slot_bytes
        return column * column_bytes // self.granule_bytes, -(-(column + 1) * column_bytes // self.granule_bytes)


def first_planes(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """Number of the first plane of each layout when their planes are numbered one after the other."""
    starts = [0]
    for layout in layouts:
        starts.append(starts[-1] + len(layout.plane_granules))
    return tuple(starts[:-1])


def _divisors(value: int) -> list[int]:
    small = [d for d in range(1, int(value**0.5) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})
