"""Marks in order of their last use, in stages of age: who has waited longest is found, moved and taken out in O(1).

The links lie in the marks themselves: no container holds hundreds of thousands of them, so the garbage collector has
nothing to walk over. A mark is in one chain at most.
"""

from collections.abc import Iterator

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.tree.mark import Mark


class Chain:
    """Marks of one stage, the least recently used first."""

    __slots__ = ("first", "last", "size")

    def __init__(self) -> None:
        self.first: Mark | None = None
        self.last: Mark | None = None
        self.size = 0

    def append(self, mark: Mark) -> None:
        """Enter `mark`, which is in no chain, as the most recently used."""
        last = self.last
        mark.older, mark.newer = last, None
        if last is None:
            self.first = mark
        else:
            last.newer = mark
        self.last = mark
        self.size += 1

    def remove(self, mark: Mark) -> None:
        """Take out `mark`, which is in this chain."""
        older, newer = mark.older, mark.newer
        if older is None:
            self.first = newer
        else:
            older.newer = newer
        if newer is None:
            self.last = older
        else:
            newer.older = older
        mark.older = mark.newer = None
        self.size -= 1

    def clear(self) -> None:
        """Take all out, one by one: links are references, and nothing else would ever free what points to itself."""
        while self.first is not None:
            self.remove(self.first)

    def __iter__(self) -> Iterator[Mark]:
        mark = self.first
        while mark is not None:
            yield mark
            mark = mark.newer

    def check(self) -> None:
        """Raise InvariantError where links or the count disagree."""
        count, before = 0, None
        for mark in self:
            if mark.older is not before:
                raise InvariantError(f"the links of a chain disagree at its entry {count}")
            count, before = count + 1, mark
        if before is not self.last or count != self.size:
            raise InvariantError(f"a chain of {count} marks counts {self.size}")
