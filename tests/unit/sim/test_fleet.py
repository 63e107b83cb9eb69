"""A fleet behind a router: seconds by hand, what a router hears late, and servers that die."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.routing.policies import POLICIES
from sglang_hybrid.sim.fleet import Failure, Fleet, FleetShape, Served, Turn, sessions
from sglang_hybrid.sim.shape import Shape
from sglang_hybrid.sim.trace import make_request, make_trace

MODEL = ModelSpec("toy", kv_bytes_per_token=512, checkpoint_bytes=58_368, flops_per_token=1e6, flops_per_token_pair=10)
PAGE = 8


def shape(servers: int, lag_s: float = 0.0, kv_tokens: int = 20_000, exact: bool = False) -> FleetShape:
    """Ten tokens take a second to compute, and to decode; nothing else takes time."""
    return FleetShape(MODEL, Shape(40, kv_tokens, PAGE), servers, 10.0, 0.0, 10.0, lag_s, exact)


def ask(fleet: FleetShape, *prompts: tuple[float, list[int], int]) -> tuple[list[list[Turn]], list[float]]:
    """Sessions of one request each: when, the prompt, tokens of the answer."""
    found = [make_request(tokens, [9] * answer, at, str(k)) for k, (at, tokens, answer) in enumerate(prompts)]
    return sessions(make_trace("asked", found), fleet), [at for at, _, _ in prompts]


def play(fleet: Fleet, *prompts: tuple[float, list[int], int], failures: tuple[Failure, ...] = ()) -> list[Served]:
    fleet.play(*ask(fleet.shape, *prompts), failures)
    assert not any(server.jobs or server.queue or server.waiting_tokens for server in fleet.servers)
    return fleet.served


def test_prompts_wait_for_those_before_them_and_skip_what_is_cached() -> None:
    first, second, third = play(
        Fleet(shape(1), "round_robin"), (0.0, [1] * 40, 1), (1.0, [2] * 20, 1), (20.0, [1] * 60, 1)
    )
    assert (first.first_token_s, first.hit_tokens) == (4.0, 0)
    assert (second.first_token_s, second.hit_tokens) == (6.0, 0)
    assert (third.first_token_s, third.hit_tokens) == (22.0, 40)


def test_the_next_turn_comes_a_pause_after_the_answer() -> None:
    turns = [make_request([1] * 20, [9] * 11, 0.0, "a", 0), make_request([1] * 50, [9], 7.0, "a", 1)]
    fleet = Fleet(shape(1), "round_robin")
    fleet.play(sessions(make_trace("two", turns), fleet.shape), [3.0])
    assert [served.came_s for served in fleet.served] == [3.0, 3.0 + 2.0 + 1.0 + 7.0]


def test_a_router_that_hears_late_sends_elsewhere_and_promises_less() -> None:
    asked = ((0.0, [1] * 80, 1), (60.0, [3] * 40, 1), (70.0, [1] * 80, 1))
    for lag, promised in ((0.0, 72), (50.0, 72), (65.0, 0)):
        third = play(Fleet(shape(3, lag), "restart_points"), *asked)[2]
        assert (third.promised_tokens, third.hit_tokens) == ((promised, 72) if promised else (0, 0))


def test_promises_of_blocks_are_false_where_no_state_is() -> None:
    shared = [1] * 80
    asked = ((0.0, [*shared, *[2] * 40], 1), (60.0, [*shared, *[3] * 40], 1), (120.0, [*shared, *[4] * 40], 1))
    blocks = play(Fleet(shape(2), "kv_events"), *asked)
    points = play(Fleet(shape(2), "restart_points"), *asked)
    assert [(s.promised_tokens, s.hit_tokens) for s in blocks] == [(0, 0), (80, 0), (80, 80)]
    assert [(s.promised_tokens, s.hit_tokens) for s in points] == [(0, 0), (0, 0), (80, 80)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_had_no_first_token_is_sent_again_and_answers_break_off(policy: str) -> None:
    asked = ((0.0, [1] * 40, 200), (0.0, [2] * 40, 1), (0.0, [3] * 40, 1), (0.0, [4] * 40, 1), (50.0, [1] * 48, 1))
    served = play(Fleet(shape(2), policy), *asked, failures=(Failure(5.0, 0, 10.0), Failure(6.0, 0, 10.0)))
    assert all(one.first_token_s > one.came_s for one in served)
    assert [one.broken for one in served] == [True, False, False, False, False]
    again = [one.sent for one in served]
    assert sorted(again) == [1, 1, 1, 1, 2]
    assert served[again.index(2)].server == 1
    assert served[4].hit_tokens == 0, "its cache was lost with the server"


def test_what_a_dead_server_told_is_not_believed_of_the_next() -> None:
    asked = ((0.0, [1] * 80, 1), (60.0, [1] * 80, 1))
    for failures, promised in (((), 72), ((Failure(20.0, 0, 10.0),), 0)):
        for lag_s in (0.0, 30.0):
            second = play(Fleet(shape(1, lag_s), "restart_points"), *asked, failures=failures)[1]
            assert (second.promised_tokens, second.hit_tokens) == (promised, promised)


@pytest.mark.parametrize("policy", ["restart_points", "kv_events"])
def test_what_was_on_its_way_to_a_dead_server_is_not_believed_of_the_next(policy: str) -> None:
    """The second prompt comes while the first would still count as on its way."""
    for failures, left in (((), 8), ((Failure(8.5, 0, 0.5),), 80)):
        fleet = Fleet(shape(1, lag_s=100.0), policy)
        play(fleet, (0.0, [1] * 80, 2), (9.5, [1] * 80, 1), failures=failures)
        assert fleet._policy.left_tokens == left


def test_requests_wait_while_all_servers_are_down() -> None:
    served = play(Fleet(shape(1), "restart_points"), (3.0, [1] * 40, 1), failures=(Failure(1.0, 0, 10.0),))
    assert served[0].first_token_s == 15.0


def test_a_prompt_waits_for_room() -> None:
    served = play(Fleet(shape(1, kv_tokens=100), "round_robin"), (0.0, [1] * 40, 30), (1.0, [2] * 40, 1))
    assert served[1].first_token_s == 4.0 + 2.9 + 4.0


def test_an_exact_router_knows_what_is_left_of_a_queue() -> None:
    asked = ((0.0, [1] * 100, 1), (1.0, [2] * 95, 1), (9.0, [3] * 10, 1))
    assert [s.server for s in play(Fleet(shape(2), "restart_points"), *asked)] == [0, 1, 1]
    assert [s.server for s in play(Fleet(shape(2, exact=True), "restart_points"), *asked)] == [0, 1, 0]
    shorter = ((0.0, [1] * 100, 1), (1.0, [2] * 50, 1), (4.0, [3] * 10, 1))
    assert [s.server for s in play(Fleet(shape(2, exact=True), "restart_points"), *shorter)] == [0, 1, 1]


def test_the_same_fleet_plays_the_same_again() -> None:
    rng = np.random.default_rng(0)
    asked = [(float(t), [int(k)] * 50, 5) for t, k in zip(np.arange(60) * 3.0, rng.integers(1, 4, 60), strict=True)]
    once, twice = (play(Fleet(shape(3, 1.0), "restart_points"), *asked) for _ in range(2))
    assert once == twice
    assert sum(s.hit_tokens for s in once) > 0


def test_a_session_ends_before_what_no_server_can_hold() -> None:
    turns = [make_request([1] * n, [9], float(k), "a", k) for k, n in enumerate((20, 300, 30))]
    found = sessions(make_trace("long", turns), shape(1, kv_tokens=100))
    assert [[turn.request.n_input for turn in session] for session in found] == [[20]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"servers": 0}, "one server or more: 0"),
        ({"prefill_tokens_per_s": 0.0}, "positive pace"),
        ({"decode_tokens_per_s": float("nan")}, "positive pace"),
        ({"lag_s": -1.0}, "not negative: -1.0"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(more: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FleetShape(**{"model": MODEL, "shape": Shape(40, 1000), "servers": 2, **more})  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"choose one of round_robin, .*: best"):
        Fleet(shape(1), "best")
