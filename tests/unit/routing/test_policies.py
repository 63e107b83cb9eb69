"""Which worker gets a prompt: every policy against a naive reading of it, and at the edges."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.routing import policies
from sglang_hybrid.routing.index import NOTHING, Reach, block_hashes
from sglang_hybrid.routing.policies import Offer, Prompt, RestartPoints, Sessions, Text, Turns

PAGE = 4
NAMES = sorted(policies.POLICIES)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def prompt(tokens: list[int]) -> Prompt:
    return Prompt(len(tokens), block_hashes(tokens[:-1], PAGE), PAGE)


def offers(workers: int, **of: Offer) -> dict[str, Offer]:
    return {name: of.get(name, Offer()) for name in "abcdefgh"[:workers]}


@pytest.mark.parametrize("name", NAMES)
def test_equal_workers_take_turns_whatever_is_asked(name: str) -> None:
    policy = policies.create(name, Clock())
    seen = [policy.choose(Prompt(0, (), 1), offers(3)) for _ in range(9)]
    assert seen == ["a", "b", "c"] * 3
    fresh = policies.create(name, Clock())
    assert [fresh.choose(prompt([k] * 9), offers(3)) for k in range(6)] == ["a", "b", "c"] * 2


@pytest.mark.parametrize("name", NAMES)
def test_one_worker_gets_everything_and_workers_come_and_go(name: str) -> None:
    clock, rng = Clock(), random.Random(3)
    policy = policies.create(name, clock)
    assert {policy.choose(prompt([1] * n), offers(1)) for n in (1, 2, 40)} == {"a"}
    for _ in range(300):
        clock.now += rng.random()
        workers = rng.sample("abcdefgh", rng.randint(1, 8))
        asked = prompt([rng.randint(1, 2)] * rng.randint(1, 20))
        held = PAGE * len(asked.names)
        some = {
            worker: Offer(Reach(rng.choice([0, held]), held), rng.randint(0, 99), rng.randint(0, 9))
            for worker in workers
        }
        assert policy.choose(asked, some) in some


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_has_a_clock_of_its_own_or_draws_random_numbers(name: str) -> None:
    chosen = []
    for _ in range(2):
        clock, rng = Clock(), random.Random(5)
        policy = policies.create(name, clock)
        found = []
        for _ in range(200):
            clock.now += rng.random()
            some = {w: Offer(Reach(0, PAGE * rng.randint(0, 4)), rng.randint(0, 30), rng.randint(0, 4)) for w in "abcd"}
            found.append(policy.choose(prompt([rng.randint(1, 3)] * 17), some))
        chosen.append(found)
    assert chosen[0] == chosen[1]


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"choose one of round_robin, .*restart_points: best"):
        policies.create("best")


@pytest.mark.parametrize("seed", range(10))
def test_turns_choose_the_least_and_of_equals_the_one_chosen_longest_ago(seed: int) -> None:
    rng, turns, history = random.Random(seed), Turns(), list[str]()
    for _ in range(300):
        costs = {w: float(rng.randint(0, 1)) for w in rng.sample("abcdef", rng.randint(1, 6))}
        least = [w for w in sorted(costs) if costs[w] == min(costs.values())]
        ages = {w: history[::-1].index(w) if w in history else len(history) + 1 for w in least}
        expected = max(least, key=lambda w: (ages[w], -ord(w)))
        assert turns.least(costs) == expected
        history.append(expected)


def test_turns_remember_few_workers_that_are_gone() -> None:
    turns = Turns()
    for k in range(1000):
        turns.least({f"worker {k}": 0.0, f"other {k}": 0.0})
    assert len(turns._latest) <= 2 * 2 + 64 + 1


def test_least_load_counts_requests_first_and_tokens_then() -> None:
    policy = policies.create("least_load", Clock())
    some = offers(3, a=Offer(running=2), b=Offer(running=1, waiting_tokens=900), c=Offer(running=1, waiting_tokens=800))
    assert policy.choose(prompt([1] * 9), some) == "c"
    assert policy.choose(prompt([1] * 9), {"a": some["a"], "b": some["b"]}) == "b"


def test_text_follows_what_was_sent_and_not_what_is_held() -> None:
    policy, long = Text(Clock()), [*range(40)]
    assert policy.choose(prompt(long), offers(3)) == "a"
    held = offers(3, b=Offer(Reach(36, 36)))
    assert policy.choose(prompt([*long, 1]), held) == "a"
    little = [*long[: 3 * PAGE], *range(100, 130)]  # 12 of 42 tokens: less than `MATCHED`
    assert policy.choose(prompt(little), offers(3, a=Offer(running=1), b=Offer(running=1))) == "c"
    assert policy.choose(prompt([*long, 1]), offers(3, b=Offer(), c=Offer())) == "a"
    without = {name: Offer() for name in "bc"}
    assert policy.choose(prompt(long), without) in without
    assert policy.choose(prompt([*little, 1]), offers(3)) == "c"


def test_text_follows_more_than_three_tenths_of_a_prompt() -> None:
    for shared, expected in ((3 * PAGE, "b"), (4 * PAGE, "a")):  # of 40 tokens
        policy = Text(Clock())
        assert policy.choose(prompt([*range(40)]), offers(2)) == "a"
        asked = [*range(shared), *range(100, 140 - shared)]
        assert policy.choose(prompt(asked), offers(2, a=Offer(running=1))) == expected


def test_text_remembers_a_worker_that_is_busy_for_a_moment_and_forgets_those_that_went() -> None:
    policy, long = Text(Clock()), [*range(40)]
    assert policy.choose(prompt(long), offers(2)) == "a"
    policy.choose(prompt([9, 9]), {"b": Offer()})
    assert policy.choose(prompt(long), offers(2, a=Offer(running=1))) == "a"
    for number in range(50):
        policy.choose(prompt([9, 9]), {f"worker {number}": Offer()})
    assert len(policy._sent) <= 2 + Text.GONE + 1
    assert policy.choose(prompt(long), offers(2, a=Offer(running=1))) == "b"


def test_text_leaves_a_worker_that_has_far_more_requests() -> None:
    policy, long = Text(Clock()), [*range(40)]
    assert policy.choose(prompt(long), offers(2)) == "a"
    few, many = Offer(running=Text.MORE_REQUESTS), Offer(running=Text.MORE_REQUESTS + 1)
    assert policy.choose(prompt(long), offers(2, a=few)) == "a"
    assert policy.choose(prompt(long), offers(2, a=Offer(running=300), b=Offer(running=200))) == "a"
    assert policy.choose(prompt(long), offers(2, a=many)) == "b"


def cost(policy: RestartPoints, tokens: int, offer: Offer, blocks_are_hits: bool) -> int:
    """What a worker costs to which nothing is on its way."""
    kv = offer.reach.kv_tokens
    left = tokens - (kv if blocks_are_hits else offer.reach.resume_tokens)
    full = policy.FULL_TOKENS * offer.full
    return offer.waiting_tokens + left + tokens - kv + policy.REQUEST_TOKENS * offer.running + full


@pytest.mark.parametrize("name", ["restart_points", "kv_events"])
@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_worker_is_chosen(name: str, seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    policy = policies.create(name, clock)
    assert isinstance(policy, RestartPoints)
    for _ in range(60):
        clock.now += policy.LIFE_S  # nothing is coming any more
        asked = prompt([rng.randint(0, 1) for _ in range(rng.randint(1, 60))])
        pages, some = len(asked.names), {}
        for worker in rng.sample("abcde", rng.randint(1, 5)):
            kv = rng.randint(0, pages)
            reach = Reach(PAGE * rng.randint(0, kv), PAGE * kv)
            some[worker] = Offer(reach, rng.choice([0, 0, 5, 40, 1000]), rng.randint(0, 3), rng.random() < 0.3)
        costs = {worker: cost(policy, asked.tokens, offer, name == "kv_events") for worker, offer in some.items()}
        chosen = policy.choose(asked, some)
        assert costs[chosen] == min(costs.values())
        reach = some[chosen].reach
        skipped = reach.kv_tokens if name == "kv_events" else reach.resume_tokens
        assert policy.left_tokens == asked.tokens - skipped


def test_a_full_worker_is_left_for_one_with_room_but_not_for_another_full_one() -> None:
    policy, long = RestartPoints(Clock()), prompt(list(range(41)))
    held = Offer(Reach(40, 40), running=3, full=True)
    assert policy.choose(long, offers(2, a=held)) == "b"
    assert policy.choose(long, offers(2, a=held, b=Offer(running=3, full=True))) == "a"


def test_what_is_on_its_way_counts_as_there_until_it_expires() -> None:
    for wait, expected in ((0.0, "a"), (RestartPoints.LIFE_S - 0.1, "a"), (RestartPoints.LIFE_S, "b")):
        clock = Clock()
        policy, long = RestartPoints(clock), [*range(41)]
        assert policy.choose(prompt(long), offers(2)) == "a"
        clock.now = wait
        assert policy.choose(prompt([*long, 1]), offers(2, a=Offer(waiting_tokens=10))) == expected


def test_a_prompt_that_leaves_a_branch_makes_it_a_resume_point() -> None:
    """The first left KV beyond its states; the second computes there, and leaves a state where the two part."""
    clock, shared = Clock(), [*range(40)]
    policy = RestartPoints(clock)
    branch = offers(2, a=Offer(Reach(0, 40)))
    assert policy.choose(prompt([*shared, *[7] * 20]), branch) == "a"
    busy = offers(2, a=Offer(Reach(0, 40), waiting_tokens=70))
    assert policy.choose(prompt([*shared, *[8] * 20]), busy) == "a", "40 tokens are skipped there"
    other = RestartPoints(clock)
    assert other.choose(prompt([*shared, *[8] * 20]), busy) == "b"


def test_of_kv_events_blocks_are_hits() -> None:
    some = offers(2, a=Offer(Reach(0, 40)), b=Offer(Reach(24, 24)))
    assert policies.create("kv_events", Clock()).choose(prompt([*range(45)]), some) == "a"
    assert policies.create("restart_points", Clock()).choose(prompt([*range(45)]), some) == "b"


def test_prompts_on_their_way_are_counted_as_what_they_will_compute() -> None:
    for name in NAMES:
        policy, long = policies.create(name, Clock()), [*range(40)]
        assert policy.choose(prompt([*long, 1]), offers(1)) == "a"
        assert policy.left_tokens == 41
        policy.choose(prompt([*long, 2]), offers(1, a=Offer(Reach(8, 12))))
        assert policy.left_tokens == {"restart_points": 1, "kv_events": 1}.get(name, 33)


@pytest.mark.parametrize("new_tokens", [8, 100])
def test_a_popular_beginning_spreads_when_its_worker_is_busy(new_tokens: int) -> None:
    """Others compute it once the one that holds it has a queue, and not before."""
    policy, waiting, running = RestartPoints(Clock()), Counter[str](), Counter[str]()
    first: dict[str, int] = {}
    for k in range(160):
        asked = prompt([*range(4000), *[5000 + k] * new_tokens])
        some = {worker: Offer(NOTHING, waiting[worker], running[worker]) for worker in "abcd"}
        some["a"] = some["a"]._replace(reach=Reach(4000, 4000))
        chosen = policy.choose(asked, some)
        first.setdefault(chosen, k)
        running[chosen] += 1
        waiting[chosen] += policy.left_tokens
    assert list(first) == ["a", "b", "c", "d"]
    assert first["b"] > 10
    assert max(running.values()) < 2 * min(running.values())


def test_memory_for_prompts_on_their_way_is_bounded() -> None:
    policy = RestartPoints(Clock())
    for k in range(RestartPoints.MOST + 50):
        policy.choose(prompt([k, *range(12)]), offers(2))
    assert len(policy._coming) == RestartPoints.MOST


def test_a_session_stays_where_it_was_unless_work_waits_there() -> None:
    policy = policies.create("sessions", Clock())
    of = lambda name: Prompt(0, (), 1, name)  # noqa: E731
    first = {name: policy.choose(of(name), offers(3)) for name in ("x", "y", "z")}
    assert sorted(first.values()) == ["a", "b", "c"]
    for _ in range(4):
        assert {name: policy.choose(of(name), offers(3)) for name in ("z", "x", "y")} == first
        policy.choose(of(None), offers(3))
    busy = {first["x"]: Offer(running=Sessions.MORE_REQUESTS)}
    assert policy.choose(of("x"), offers(3, **busy)) == first["x"]
    moved = policy.choose(of("x"), offers(3, **{first["x"]: Offer(running=Sessions.MORE_REQUESTS + 1)}))
    assert moved != first["x"]
    assert policy.choose(of("x"), offers(3)) == moved, "its cache is there now"
    left = {name: offer for name, offer in offers(3).items() if name != moved}
    assert policy.choose(of("x"), left) in left, "that worker is gone"


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sessions, "MOST", 10)
    policy = Sessions()
    for number in range(100):
        policy.choose(Prompt(0, (), 1, str(number)), offers(3))
    assert len(policy._latest) == 10
