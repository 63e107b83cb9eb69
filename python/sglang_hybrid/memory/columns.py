"""Which columns of a pool are mapped, and what each costs when columns share granules.

Ownership: a column is UNMAPPED (no memory of its own), WARM (mapped, no live page: memory on call) or LIVE (at least
one live page). A granule is mapped while a WARM or LIVE column touches it, and *used* while a LIVE one does.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.memory.backing import Run
from sglang_hybrid.memory.layout import Layout, Planes

UNMAPPED, WARM, LIVE = range(3)


class _Group:
    """Reference counts of the granules of equal planes; what holds for one plane holds for all."""

    def __init__(self, layout: Layout, planes: Planes, first_plane: int) -> None:
        self.planes = planes
        self.first_plane = first_plane
        self.spans = [range(*layout.span(planes, column)) for column in range(layout.columns)]
        self.live = [0] * self.spans[-1].stop  # LIVE columns that touch a granule; counted only where columns share
        self.held = [0] * self.spans[-1].stop  # mapped columns, WARM or LIVE, that touch it

    def count(self, counts: list[int], column: int, step: int) -> int:
        """Add `step` to `live` or `held` of the column's granules; how many more are in use, over all planes."""
        more = 0
        for granule in self.spans[column]:
            was = counts[granule]
            counts[granule] = was + step
            more += (was + step > 0) - (was > 0)
        return more * self.planes.count

    def runs(self, granules: Sequence[int]) -> list[Run]:
        """Increasing `granules` of every plane."""
        stretches = list(_stretches(granules))
        return [Run(self.first_plane + at, *stretch) for stretch in stretches for at in range(self.planes.count)]


class Columns:
    """The mapping side of one pool. It decides and counts; Budget calls the backing."""

    def __init__(self, layout: Layout, first_plane: int, by_index: bool = False) -> None:
        self.layout = layout
        self.exclusive = layout.exclusive
        self._warm_first = layout.exclusive and not by_index
        self.column_granules = layout.column_granules
        self.state = bytearray([UNMAPPED]) * layout.columns
        self.live_columns = 0
        self.used_granules = 0
        self.mapped_granules = 0
        self.warm_since: dict[int, float] = {}
        self._groups: list[_Group] = []
        for planes in layout.planes:
            self._groups.append(_Group(layout, planes, first_plane))
            first_plane += planes.count

    def candidates(self, count: int) -> list[int]:
        """The `count` columns to use next; fewer if there are fewer.

        WARM ones, which cost no driver call, then UNMAPPED ones, lowest index first. Where columns share granules the
        order is by index alone: neighbours stay together, and the cost does not depend on what else was unmapped. So
        it is with `by_index`.
        """
        warm = self._lowest(WARM, count)
        if self._warm_first:
            return warm if len(warm) == count else warm + self._lowest(UNMAPPED, count - len(warm))
        return sorted(warm + self._lowest(UNMAPPED, count))[:count]

    def _lowest(self, state: int, count: int) -> list[int]:
        """The `count` columns in `state` of lowest index, which keeps neighbours together."""
        found: list[int] = []
        at = -1
        while len(found) < count and (at := self.state.find(state, at + 1)) >= 0:
            found.append(at)
        return found

    def all_warm(self, columns: Sequence[int]) -> bool:
        """Whether `columns` need no mapping."""
        return UNMAPPED not in [self.state[column] for column in columns]

    def cost(self, columns: Sequence[int]) -> int:
        """Granules that become used when `columns` (none of them LIVE) turn LIVE."""
        if self.exclusive:
            return len(columns) * self.column_granules
        total = 0
        for group in self._groups:
            touched = {granule for column in columns for granule in group.spans[column]}
            total += group.planes.count * sum(group.live[granule] == 0 for granule in touched)
        return total

    def used_after(self, emptied: AbstractSet[int], count: int) -> int | None:
        """Used granules once LIVE columns `emptied` run empty and `count` turn LIVE; None if there are too few."""
        if count > len(self.state) - self.live_columns + len(emptied):
            return None
        if self.exclusive:
            return self.used_granules + (count - len(emptied)) * self.column_granules
        ahead = sorted({*emptied, *self.candidates(count)})[:count]
        total = self.used_granules
        for group in self._groups:
            change: dict[int, int] = {}
            for columns, step in ((emptied, -1), (ahead, 1)):
                for column in columns:
                    for granule in group.spans[column]:
                        change[granule] = change.get(granule, 0) + step
            for granule, step in change.items():
                total += group.planes.count * ((group.live[granule] + step > 0) - (group.live[granule] > 0))
        return total

    def missing(self, columns: Sequence[int]) -> list[Run]:
        """Runs to map before `columns` can be used."""
        runs = []
        for group in self._groups:
            touched = {granule for column in columns for granule in group.spans[column]}
            bare = [granule for granule in sorted(touched) if not group.held[granule]]
            runs += group.runs(bare)
        return runs

    def releasable(self, column: int) -> list[Run]:
        """Runs that lose their last user when WARM `column` is unmapped."""
        runs = []
        for group in self._groups:
            span = group.spans[column]
            lone = [granule for granule in span if group.held[granule] == 1]
            runs += group.runs(lone)
        return runs

    def move(self, columns: Sequence[int], to: int, now: float = 0.0) -> None:
        """Change the state of `columns`; LIVE and UNMAPPED touch each other only through WARM or a fresh mapping."""
        state = self.state
        for column in columns:
            was = state[column]
            if was == to or (was == LIVE and to == UNMAPPED):
                raise InvariantError(f"pool {self.layout.name!r}: column {column} cannot go from {was} to {to}")
            if was == UNMAPPED or to == UNMAPPED:
                step = 1 if was == UNMAPPED else -1
                self.mapped_granules += sum(group.count(group.held, column, step) for group in self._groups)
            if was == LIVE or to == LIVE:
                step = 1 if to == LIVE else -1
                self.live_columns += step
                if self.exclusive:
                    self.used_granules += step * self.column_granules
                else:
                    self.used_granules += sum(group.count(group.live, column, step) for group in self._groups)
            if was == WARM:
                del self.warm_since[column]
            if to == WARM:
                self.warm_since[column] = now
            state[column] = to

    def check(self) -> None:
        """Raise InvariantError unless reference counts and totals follow from the column states."""
        used = mapped = 0
        for group in self._groups:
            live, held = [0] * len(group.live), [0] * len(group.held)
            for column, state in enumerate(self.state):
                for granule in group.spans[column]:
                    live[granule] += state == LIVE
                    held[granule] += state != UNMAPPED
            if held != group.held or (live != group.live and not self.exclusive):
                raise InvariantError(f"pool {self.layout.name!r}: reference counts differ in {group.planes.name!r}")
            used += group.planes.count * sum(n > 0 for n in live)
            mapped += group.planes.count * sum(n > 0 for n in held)
        if (used, mapped) != (self.used_granules, self.mapped_granules):
            raise InvariantError(f"pool {self.layout.name!r}: counts {(used, mapped)} != {self.mapped_granules}")
        if self.live_columns != self.state.count(LIVE):
            raise InvariantError(f"pool {self.layout.name!r}: live columns are miscounted: {self.live_columns}")
        if set(self.warm_since) != {column for column, state in enumerate(self.state) if state == WARM}:
            raise InvariantError(f"pool {self.layout.name!r}: warm columns differ: {sorted(self.warm_since)}")


def _stretches(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each maximal run of consecutive integers in increasing `values`."""
    start = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[index - 1] + 1:
            yield values[start], index - start
            start = index
