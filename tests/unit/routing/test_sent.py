"""What was sent to workers: against naive references, through random steps, with the bounds of memory."""

from __future__ import annotations

import random

import pytest

from sglang_hybrid.routing.index import Reach
from sglang_hybrid.routing.sent import Coming, SentPages

PAGE = 4
WORKERS = ["a", "b", "c"]


def prompt(rng: random.Random, branches: int = 2, most: int = 7) -> list[int]:
    """Names of the pages of a random prompt: each depends on all before it, so that prompts are a tree."""
    names, name = [], 1
    for _ in range(rng.randint(0, most)):
        name = name * (branches + 1) + rng.randint(1, branches)
        names.append(name)
    return names


def common(one: list[int], other: list[int]) -> int:
    """Pages that two prompts share."""
    return sum(a == b for a, b in zip(one, other, strict=False))


@pytest.mark.parametrize("seed", range(30))
def test_sent_pages_are_the_longest_beginning_that_was_sent(seed: int) -> None:
    rng, pages = random.Random(seed), SentPages(10_000)
    sent: dict[str, list[list[int]]] = {worker: [] for worker in WORKERS}
    for _ in range(60):
        worker, names = rng.choice(WORKERS), prompt(rng)
        for each in WORKERS:
            assert pages.pages(each, names) == max((common(names, before) for before in sent[each]), default=0)
        pages.add(worker, names)
        sent[worker].append(names)
        if rng.random() < 0.05:
            left = rng.sample(WORKERS, 2)
            pages.keep(left)
            sent = {each: before if each in left else [] for each, before in sent.items()}


@pytest.mark.parametrize("seed", range(30))
def test_sent_pages_forget_what_came_longest_ago_and_ends_before_beginnings(seed: int) -> None:
    rng, most = random.Random(seed), 12
    pages, order = SentPages(most), list[int]()  # those that came last are last
    for _ in range(80):
        names = prompt(rng)
        pages.add("a", names)
        for name in reversed(names):
            if name in order:
                order.remove(name)
            order.append(name)
        del order[:-most]
        asked = prompt(rng)
        held = 0
        while held < len(asked) and asked[held] in order:
            held += 1
        assert pages.pages("a", asked) == held


def test_a_prompt_longer_than_the_room_keeps_its_beginning() -> None:
    pages = SentPages(3)
    pages.add("a", [1, 2, 3, 4, 5])
    assert pages.pages("a", [1, 2, 3, 4, 5]) == 3
    pages.add("a", [])
    assert pages.pages("a", []) == 0
    assert pages.pages("nobody", [1]) == 0


class NaiveComing:
    """Every prompt in a list."""

    def __init__(self, life_s: float, most: int) -> None:
        self.life_s, self.most = life_s, most
        self.prompts: list[tuple[float, str, list[int], list[int]]] = []

    def add(self, worker: str, names: list[int], states: list[int], now: float) -> None:
        self.prompts.append((now + self.life_s, worker, names, states))
        self.expire(now)

    def expire(self, now: float) -> None:
        self.prompts = [one for one in self.prompts if one[0] > now][-self.most :]

    def reaches(self, names: list[int], page_tokens: int) -> dict[str, Reach]:
        found: dict[str, Reach] = {}
        for _, worker, sent, states in self.prompts:
            kv = common(names, sent)
            resume = max((at for at in states if at <= kv), default=0)
            if kv:
                before = found.get(worker, Reach(0, 0))
                found[worker] = Reach(
                    max(before.resume_tokens, resume * page_tokens), max(before.kv_tokens, kv * page_tokens)
                )
        return found


@pytest.mark.parametrize("seed", range(40))
def test_coming_prompts_are_known_until_they_expire(seed: int) -> None:
    rng = random.Random(seed)
    life_s, most = rng.choice([(5.0, 1000), (5.0, 6), (1e9, 4)])
    coming, naive, now = Coming(life_s, most), NaiveComing(life_s, most), 0.0
    for _ in range(120):
        now += rng.choice([0.0, 0.5, 1.0])
        names = prompt(rng)
        if names and rng.random() < 0.6:
            worker = rng.choice(WORKERS)
            states = sorted(rng.sample(range(1, len(names) + 1), rng.randint(0, min(2, len(names)))))
            coming.add(worker, names, states, now)
            naive.add(worker, names, states, now)
        else:
            coming.expire(now)
            naive.expire(now)
        assert len(coming) == len(naive.prompts) <= most
        for asked in (names, prompt(rng)):
            assert coming.reaches(asked, PAGE) == naive.reaches(asked, PAGE)
    coming.expire(now + life_s)
    assert len(coming) == 0
    assert (coming._pages, coming._states) == ({}, {}), "nothing is left of what expired"


def test_what_is_coming_ends_with_its_second_and_not_before() -> None:
    coming = Coming(10.0, 100)
    coming.add("a", [1, 2], [2], 5.0)
    coming.expire(14.999)
    assert coming.reaches([1, 2, 3], PAGE) == {"a": Reach(8, 8)}
    coming.expire(15.0)
    assert coming.reaches([1, 2, 3], PAGE) == {}
