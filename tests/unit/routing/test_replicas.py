"""Which replica of one server gets a prompt."""

from __future__ import annotations

import random

import pytest

from sglang_hybrid.routing.index import block_hashes
from sglang_hybrid.routing.replicas import Load, Replicas

RANKS = (0, 1, 2, 3)


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


@pytest.fixture
def replicas() -> Replicas:
    return Replicas(clock=lambda: 0.0)


def test_conversations_are_spread_and_stay(replicas: Replicas) -> None:
    chats = [words(seed, 3000) for seed in range(8)]
    first = [replicas.choose(chat, None, RANKS) for chat in chats]
    assert sorted(first) == [0, 0, 1, 1, 2, 2, 3, 3]
    for turn in range(5):
        replicas.hear({rank: Load(1.0 + turn, 0, 0, 1 << 20, 100) for rank in RANKS})
        replicas.hear({rank: Load(1.5 + turn, 0, 0, 1 << 20, 100) for rank in RANKS})
        order = random.Random(turn).sample(range(8), 8)
        chats = [chat + words(100 + turn, 90) for chat in chats]
        assert {at: replicas.choose(chats[at], None, RANKS) for at in order} == dict(enumerate(first))


def test_adapters_and_tenants_share_nothing(replicas: Replicas) -> None:
    prompt = words(1, 400)
    assert {replicas.choose(prompt, salt, RANKS) for salt in (None, "a", "b", "c")} == set(RANKS)
    assert replicas.choose(prompt, "b", RANKS) == 2


def test_a_popular_beginning_is_not_kept_on_one_replica(replicas: Replicas) -> None:
    """None of these ends: one replica would be given all, and the others nothing."""
    shared = words(2, 1024)
    chosen = [replicas.choose(shared + words(10 + number, 64), None, RANKS) for number in range(64)]
    assert chosen[:3] == [0, 0, 1], "as long as to wait there costs less than to compute it anew"
    assert all(chosen.count(rank) > 8 for rank in RANKS)


def test_one_that_is_full_or_has_much_to_compute_is_passed_over(replicas: Replicas) -> None:
    prompt = words(3, 1000)
    assert replicas.choose(prompt, None, RANKS) == 0
    replicas.hear({0: Load(1.0, 100, 0, 1 << 20, 100)})
    assert replicas.choose(prompt, None, RANKS) == 1
    replicas.hear({0: Load(2.0, 0, 0, 1 << 20, 100), 1: Load(2.0, 1, 20_000, 1 << 20, 100)})
    replicas.hear({0: Load(3.0, 0, 0, 1 << 20, 100)})
    assert replicas.choose(prompt, None, RANKS) == 0


def test_one_that_is_gone_gets_nothing(replicas: Replicas) -> None:
    prompt = words(4, 500)
    gone = replicas.choose(prompt, None, RANKS)
    left = [rank for rank in RANKS if rank != gone]
    assert replicas.choose(prompt, None, left) in left
    assert replicas.choose(prompt, None, []) is None, "SGLang says so"


def test_what_is_sent_counts_until_a_load_must_have_it(replicas: Replicas) -> None:
    """One may have been taken before it arrived; one that is as old as the last says nothing new."""
    said = Load(0.1, 0, 0, 1 << 20, 100)
    replicas.hear({0: said})
    for ats, counted in (((0.1, 0.2, 0.2, 0.3), [1, 1, 1, 0]), ((0.3, 1.2), [1, 0])):
        replicas.choose(words(5, 500), None, [0])
        running = []
        for at in ats:
            replicas.hear({0: said._replace(at=at)})
            running.append(replicas._replicas[0].offer(0).running)
        assert running == counted
        assert replicas._replicas[0].offer(0).waiting_tokens == 0


def test_short_turns_stay_too(replicas: Replicas) -> None:
    """What the turn before left to compute there is over."""
    chat, at = words(9, 200), 2.0
    where = replicas.choose(chat, None, RANKS)
    for _ in range(6):
        replicas.hear({rank: Load(at, 0, 0, 1 << 20, 100) for rank in RANKS})
        chat, at = chat + words(int(at), 40), at + 2
        assert replicas.choose(chat, None, RANKS) == where


def test_what_kv_has_no_room_for_is_forgotten(replicas: Replicas) -> None:
    replicas.hear({0: Load(1.0, 0, 0, 640, 100)})
    old = words(6, 600)
    for prompt in (old, *[words(7 + number, 600) for number in range(3)]):
        replicas.choose(prompt, None, [0])
    assert [replicas._sent.pages("0", block_hashes(each[:-1], 64)) for each in (old, prompt)] == [0, 9]


@pytest.mark.parametrize("count", [0, 1, 64])
def test_prompts_shorter_than_a_page_are_left_to_sglang(replicas: Replicas, count: int) -> None:
    assert replicas.choose(words(8, count), None, RANKS) is None
