"""Who gets a slot where states are short: those that a pass is to save, or those that are cached."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


class Index:
    """Stands for the index of victims: worths of cached states, and of contenders by their `end_tokens`."""

    def __init__(self, worths: list[float]) -> None:
        self.worths = sorted(worths)
        self.chosen: list[float] = []

    def weakest(self, _: Any, pool: Any, contenders: dict[int, Any], count: int, now: float) -> list[int]:
        mine = [(candidate.end_tokens, number) for number, candidate in contenders.items()]
        first = sorted([*((worth, 0) for worth in self.worths), *mine])[:count]
        self.chosen = [worth for worth, number in first if not number]
        self.worths = self.worths[len(self.chosen) :]
        return [number for _, number in first if number]


@pytest.fixture
def contest() -> Callable[..., tuple[set[int], Index]]:
    from sglang_hybrid.engine.cache.memory import Memory

    def hold(wanted: list[float], cached: list[float], free: int, frees: float = 1.0) -> tuple[set[int], Index]:
        index = Index(cached)
        states = SimpleNamespace(available_size=lambda: free)
        evicted: list[float] = []

        def evict_chosen(self: Any) -> float:
            evicted.extend(index.chosen)
            return frees * len(index.chosen)

        kind = type("Fake", (Memory,), {"shared": False, "evict_chosen": evict_chosen})
        kind.__abstractmethods__ = frozenset()
        cache = SimpleNamespace(tree_core=None)
        rest = dict.fromkeys(("decisions", "slots", "account", "tier"))
        memory = kind(SimpleNamespace(cache=cache, states=states, victims=index, now=lambda: 0.0, **rest))
        contenders = {-n: SimpleNamespace(end_tokens=worth) for n, worth in enumerate(wanted, 1)}
        stay = memory.contest(contenders)
        assert len(evicted) + len(index.worths) == len(cached)
        return stay, index

    return hold


def test_free_slots_are_taken_without_a_contest(contest: Callable[..., tuple[set[int], Index]]) -> None:
    stay, index = contest([1.0, 2.0], [0.5, 9.0], free=2)
    assert stay == {-1, -2}
    assert index.worths == [0.5, 9.0]


def test_what_is_worth_less_goes_cached_or_not(contest: Callable[..., tuple[set[int], Index]]) -> None:
    assert contest([1.0, 5.0], [3.0, 4.0, 9.0], free=0)[0] == {-2}
    assert contest([5.0, 6.0], [3.0, 4.0, 9.0], free=1)[1].worths == [4.0, 9.0]
    assert contest([1.0, 2.0], [3.0], free=0)[0] == set()
    assert contest([1.0, 2.0], [], free=1)[0] == {-2}


def test_memory_that_comes_free_in_parts_is_counted_so(contest: Callable[..., tuple[set[int], Index]]) -> None:
    stay, index = contest([5.0], [1.0, 2.0, 3.0, 4.0, 6.0], free=0, frees=0.5)
    assert (stay, index.worths) == ({-1}, [3.0, 4.0, 6.0]), "two evictions made the room of one"
    stay, index = contest([5.0], [1.0, 6.0], free=0, frees=0.5)
    assert (stay, index.worths) == (set(), [6.0]), "the second half would have cost more"


def test_an_eviction_that_frees_nothing_ends_the_contest(contest: Callable[..., tuple[set[int], Index]]) -> None:
    stay, index = contest([5.0], [1.0, 2.0], free=0, frees=0.0)
    assert (stay, index.worths) == ({-1}, [2.0]), "whether there is a slot is seen when it is asked for"
