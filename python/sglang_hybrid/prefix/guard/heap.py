"""A binary heap whose items know where they stand, so that one is moved or taken out in O(log n).

It never holds what is gone: nothing to clean up later, and no tuple per change for the garbage collector to walk over.
"""

from typing import Generic, TypeVar

T = TypeVar("T")


class Place(Generic[T]):
    """Where `item` stands in at most one heap: at index `at`, below zero if in none, by `key`."""

    __slots__ = ("at", "item", "key")

    def __init__(self, item: T) -> None:
        self.item = item
        self.key = 0.0
        self.at = -1


class Heap(Generic[T]):
    """Places with the lowest key first."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: list[Place[T]] = []

    def __len__(self) -> int:
        return len(self._places)

    def first(self) -> Place[T] | None:
        """The place with the lowest key, None if there is none."""
        return self._places[0] if self._places else None

    def put(self, place: Place[T], key: float) -> None:
        """Enter `place`, or move it if it stands here already."""
        lower = key < place.key
        place.key = key
        if place.at < 0:
            place.at = len(self._places)
            self._places.append(place)
            lower = True
        if lower:
            self._up(place)
        else:
            self._down(place)

    def remove(self, place: Place[T]) -> None:
        """Take `place` out; one that stands in no heap is ignored."""
        at = place.at
        if at < 0:
            return
        place.at = -1
        last = self._places.pop()
        if last is place:
            return
        self._places[at] = last
        last.at = at
        if last.key < place.key:
            self._up(last)
        else:
            self._down(last)

    def _up(self, place: Place[T]) -> None:
        places, key, at = self._places, place.key, place.at
        while at > 0:
            above = places[(at - 1) >> 1]
            if above.key <= key:
                break
            places[at] = above
            above.at, at = at, above.at
        places[at] = place
        place.at = at

    def _down(self, place: Place[T]) -> None:
        places, key, at = self._places, place.key, place.at
        size = len(places)
        while True:
            below = 2 * at + 1
            if below >= size:
                break
            if below + 1 < size and places[below + 1].key < places[below].key:
                below += 1
            child = places[below]
            if child.key >= key:
                break
            places[at] = child
            child.at, at = at, below
        places[at] = place
        place.at = at

    def stands(self, place: Place[T]) -> bool:
        """Whether `place` is where it says, and no lower than what is above it."""
        at, places = place.at, self._places
        return 0 <= at < len(places) and places[at] is place and places[max(0, at - 1) >> 1].key <= place.key
