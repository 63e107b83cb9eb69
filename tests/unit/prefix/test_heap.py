"""A heap whose items know their place, against a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.prefix.guard.heap import Heap, Place

STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "remove", "pop"]), st.integers(0, 9), st.integers(0, 20)))


@given(STEPS)
def test_the_lowest_key_is_first_whatever_was_moved_or_taken_out(steps: list[tuple[str, int, int]]) -> None:
    heap: Heap[int] = Heap()
    places = [Place(item) for item in range(10)]
    keys: dict[int, float] = {}
    for step, item, key in steps:
        first = heap.first()
        if step == "put":
            heap.put(places[item], float(key))
            keys[item] = float(key)
        elif step == "remove":
            heap.remove(places[item])
            keys.pop(item, None)
        elif first is not None:
            assert first.key == min(keys.values()) == keys[first.item]
            heap.remove(first)
            del keys[first.item]
        assert len(heap) == len(keys)
        assert [heap.stands(places[item]) for item in range(10)] == [item in keys for item in range(10)]
        assert all(places[item].key == key for item, key in keys.items())
    assert heap.first() is None or heap.first().key == min(keys.values())
