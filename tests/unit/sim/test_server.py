"""A simulated server: one request after the other, side by side, and what it refuses."""

import random
from collections import deque

import numpy as np
import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.misses import attribute
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.tree.check import walk
from sglang_hybrid.prefix.tree.tokens import as_tokens
from sglang_hybrid.sim.concurrent import serve
from sglang_hybrid.sim.live import _Timed
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.shape import Shape
from sglang_hybrid.sim.workloads import parse
from tests.prompts import text

MODEL = ModelSpec("toy", kv_bytes_per_token=512, checkpoint_bytes=58_368, flops_per_token=1e6, flops_per_token_pair=10)
TRACE = "sharegpt?seed=3&sessions=10"


def server(states: int = 24, kv_tokens: int = 20_000, **more: int) -> SimulatedServer:
    return SimulatedServer(MODEL, Shape(states, kv_tokens, **more))


def quiet(found: SimulatedServer) -> bool:
    """Whether all that ran gave its memory back."""
    found.check()
    states = found.free_states + found.tree.states == found.shape.states
    return states and found.free_tokens + found.tree.kv_tokens == found.shape.kv_tokens


def test_the_second_turn_resumes_on_the_grid_and_without_buffers_at_the_end_of_the_first() -> None:
    whole = text(1, 400)
    for more, hit in (({"grid": 64}, 192), ({"grid": 1, "buffers": 0}, 220)):
        found = server(**more)
        found.commit(whole[:221], 200, 0.0)
        assert found.lookup(whole[:300], 1.0) == hit
        assert quiet(found)


@pytest.mark.parametrize("tokens", [130, 400, 448])
def test_the_same_prompt_again_is_served_whatever_its_last_chunk_leaves(tokens: int) -> None:
    """The last position of the grid lies at the end of the chunk before, and slots are not to spare."""
    found = server(states=24, chunk_tokens=128)
    for number in range(40):
        whole = text(number, tokens + 5)
        found.commit(whole, tokens, float(number))
        assert found.lookup(whole[:tokens], float(number)) == (tokens - 1) // 64 * 64
    assert quiet(found)


@pytest.mark.parametrize(("tokens", "answer"), [(500, 30), (500, 100), (512, 1)])
def test_a_repeat_is_told_that_its_state_was_evicted(tokens: int, answer: int) -> None:
    """The state of its own end, which the one of the answer superseded, or that lies too far for itself."""
    found, whole = server(states=8, kv_tokens=200_000), text(1, tokens + answer)
    found.commit(whole, tokens, 0.0)
    for number in range(12):
        found.commit(text(10 + number, 300), 290, 1.0 + number)
    assert found.arrive("again", whole[:tokens], 20.0) == 0
    request = found.running["again"].request
    assert request is not None
    assert attribute(request, grid=64, step=64) == {"state_evicted": 448, "below_granularity": tokens - 448}


@pytest.mark.parametrize(("tokens", "hit"), [(130, 64), (230, 164), (400, 364), (448, 364), (610, 564)])
def test_chunks_off_the_grid_of_a_coarse_kernel_are_resumed_where_it_has_states(tokens: int, hit: int) -> None:
    found = server(states=24, chunk_tokens=100, step=64)
    for number in range(40):
        whole = text(number, tokens + 5)
        found.commit(whole, tokens, float(number))
        assert found.lookup(whole[:tokens], float(number)) == hit
    assert quiet(found)


def test_one_at_a_time_it_serves_what_a_replay_does() -> None:
    trace, one, other = parse(TRACE), server(), server()
    hits = serve(trace, one, concurrency=1, tokens_per_s=1e9)
    again = []
    for r in trace.requests:
        again.append(other.lookup(r.input_tokens, r.ts))
        other.commit(r.tokens, r.n_input, r.ts)
    assert hits.tolist() == again
    assert hits.sum() > 0
    assert quiet(one)


@pytest.mark.parametrize("concurrency", [2, 6])
@pytest.mark.parametrize("buffers", [0, 2])
def test_side_by_side_all_are_served_and_the_cache_has_less_room(concurrency: int, buffers: int) -> None:
    trace, grid = parse(TRACE), 64 if buffers else 1
    alone = serve(trace, server(grid=grid, buffers=buffers), 1, 1e9)
    found = server(grid=grid, buffers=buffers)
    hits = serve(trace, found, concurrency, tokens_per_s=2.0)
    assert quiet(found)
    assert 0 < hits.sum() < alone.sum()
    assert (hits < np.array([r.n_input for r in trace.requests])).all()


def test_memory_for_one_request_at_a_time_serves_all_of_them_one_by_one() -> None:
    trace = parse(TRACE)
    longest = max(r.tokens.size for r in trace.requests)
    found = server(states=8, kv_tokens=longest)
    assert serve(trace, found, concurrency=8, tokens_per_s=1.0).sum() > 0
    assert quiet(found)


def test_what_it_can_never_hold_is_refused() -> None:
    found = server(kv_tokens=300)
    found.commit(text(1, 400), 350, 0.0)
    assert found.lookup(text(1, 400), 1.0) == 0
    assert found.tree.nodes == 0
    with pytest.raises(ConfigError, match="slots"):
        Shape(3, 1000)
    with pytest.raises(ConfigError, match="positive pace"):
        serve(parse(TRACE), found, 0, 1.0)
    for more in ({"grid": 64, "page": 48}, {"grid": 64, "page": 0}, {"page": 64, "chunk_tokens": 100}):
        with pytest.raises(ConfigError, match="pages"):
            Shape(24, 1000, **more)


def test_a_pass_wants_so_many_free_slots_or_those_that_it_takes() -> None:
    left = {}
    for wanted in (5, 3, 0):
        found = server(states=12, grid=1, buffers=0, pass_states=wanted)
        for number in range(30):
            found.commit(text(number, 60), 50, float(number))
        found.arrive("", text(40, 50), 40.0)
        left[wanted] = found.tree.states
    assert left[5] < left[3] < left[0]
    assert (Shape(24, 1000, buffers=2).wanted_states, Shape(24, 1000, buffers=2, pass_states=0).wanted_states) == (3, 3)


def test_kv_is_held_and_matched_in_whole_pages() -> None:
    found, whole = server(states=24, kv_tokens=640, page=64), text(1, 700)
    found.arrive("", whole[:230], 0.0)
    assert found.free_tokens == 640 - 256
    found.decode("", 26, 0.0)
    assert found.free_tokens == 640 - 256
    found.decode("", 1, 0.0)
    assert found.free_tokens == 640 - 320
    found.finish("", whole[:257], 0.0)
    assert (found.tree.kv_tokens, found.free_tokens) == (256, 640 - 256)
    assert found.lookup(whole[:256], 1.0) == 192, "the last token is computed, and with it its page"
    assert found.lookup(whole[:257], 1.0) == 256
    other = whole[:300].copy()
    other[100] += 1
    found.arrive("", other, 1.0)
    found.finish("", other, 1.0)
    assert sorted(node.end for node in walk(found.tree) if node.parent is not None) == [64, 192, 256, 256]
    assert quiet(found)


def test_prompts_that_share_half_a_page_share_nothing() -> None:
    found, prompt = server(page=64, grid=64), text(1, 200)
    other = prompt.copy()
    other[40:] += 1
    for tokens in (prompt, other):
        found.commit(tokens, 200, 0.0)
    assert found.tree.kv_tokens == 2 * 192
    assert found.arrive("", prompt, 1.0, "tenant") == 0
    found.finish("", prompt, 1.0)
    assert found.tree.kv_tokens == 3 * 192
    assert [found.arrive("", prompt, 2.0, "tenant"), found.lookup(other, 2.0)] == [192, 192]
    found.finish("", prompt, 2.0)
    assert quiet(found)


def test_a_step_of_decoding_wants_a_page_whether_or_not_it_begins_one() -> None:
    """As SGLang, which evicts for a page of each running request at every step."""
    found = server(kv_tokens=64 * 6, page=64)
    found.commit(text(1, 130), 129, 0.0)  # leaves two pages
    found.arrive("", text(2, 192), 1.0)  # takes three of the other four
    found.decode("", 1, 2.0)  # begins a page
    assert (found.free_tokens, found.tree.kv_tokens) == (0, 128 + 192)
    found.decode("", 1, 2.0)  # within it
    assert (found.free_tokens, found.tree.kv_tokens) == (128, 192)
    found.finish("", text(2, 194), 3.0)
    assert quiet(found)


def shared_marks(found: SimulatedServer) -> int:
    marks = [node.state for node in walk(found.tree) if node.state is not None]
    return len(marks) - len({id(mark) for mark in marks})


@pytest.mark.parametrize("more", [{"grid": 8, "track_tokens": 16}, {"grid": 1, "buffers": 0}])
def test_the_same_prompt_twice_at_once_leaves_one_mark_for_each_state(more: dict[str, int]) -> None:
    found, prompt = server(**more), text(1, 40)
    for name in ("one", "other"):
        found.arrive(name, prompt, 0.0)
        found.decode(name, 1, 0.0)
    for name, seed in (("other", 3), ("one", 2)):
        found.decode(name, 39, 1.0)
        found.finish(name, np.concatenate((prompt, text(seed, 40))), 1.0)
        assert not shared_marks(found)
    assert quiet(found)


@pytest.mark.parametrize(
    "more", [{"grid": 8, "track_tokens": 16}, {"grid": 1, "buffers": 0}, {"grid": 8, "step": 8, "track_tokens": 16}]
)
def test_repeats_of_short_prompts_leave_one_mark_for_each_state(more: dict[str, int]) -> None:
    for seed in range(150):
        rng = random.Random(seed)
        found = server(12, 400, chunk_tokens=24, **more)
        running: dict[str, list[int]] = {}
        past: list[list[int]] = [[]]
        for step in range(8 + seed % 25):
            if rng.random() < 0.55 and len(running) < 2:
                base = rng.choice(past)
                prompt = base[: rng.randint(0, len(base))] + [rng.randint(0, 1) for _ in range(rng.randint(1, 16))]
                running[str(step)] = prompt[:50]
                found.arrive(str(step), as_tokens(prompt[:50]), float(step))
            elif running:
                name = rng.choice(sorted(running))
                answer = [rng.randint(0, 1) for _ in range(rng.randint(0, 20))]
                past.append(running.pop(name) + answer)
                found.decode(name, len(answer), float(step))
                found.finish(name, as_tokens(past[-1]), float(step))
            assert not shared_marks(found), (seed, step)


def asked_in_turns(policy: str, rounds: int = 4, documents: int = 12) -> list[int]:
    """Tokens served of each round: every document comes once a round, with a question, and a mark near its end."""
    found, hits = SimulatedServer(MODEL, Shape(20, 12_000), policy), []
    for turn in range(rounds):
        served = 0
        for number in np.random.default_rng(turn).permutation(documents):
            prompt = as_tokens([*text(int(number), 640), *text(1000 * turn + int(number) + 50, 130)])
            now = 10.0 * turn + 0.5 * len(hits)
            served += found.arrive("", prompt, now, boundaries=(prompt.size - 12,))
            found.decode("", 3, now)
            found.finish("", as_tokens([*prompt, 1, 2, 3]), now)
        hits.append(served)
        assert quiet(found)
    return hits


def test_states_that_bring_little_do_not_take_the_slots_of_branch_points() -> None:
    """A pool is always full: a place near the end of each prompt must not keep out where the next one parts."""
    ours, lru = asked_in_turns("forecast"), asked_in_turns("lru")
    assert ours[2:] == [12 * 640, 12 * 640]
    assert sum(ours) > sum(lru)


def test_a_state_that_is_worth_least_is_not_taken_and_nothing_leaves_for_it() -> None:
    found = server(states=8, kv_tokens=20_000)
    for number in range(12):
        found.commit(text(number, 600), 600, 0.01 * number)
    request = found.decisions.arrive("more", text(99, 2000), 0.2, 0, 0, boundaries=(64, 1900))
    contenders = found.decisions.contenders(request, {64: 64, 1856: 1900}, 0.2)
    held = {node.id for node in walk(found.tree) if node.state is not None}
    assert found.weakest(PoolKind.STATES, dict(contenders), 1, 0.2) == ([], [-1])  # the one at 64
    assert {node.id for node in walk(found.tree) if node.state is not None} == held
    found.check()


def test_running_requests_that_hold_more_than_all_slots_save_nothing() -> None:
    found = server(states=5)
    for number in range(3):  # of another server, whose pool was larger
        found.arrive(str(number), text(number, 300), float(number), boundaries=(100,))
    assert found.free_states <= 0
    found.arrive("more", text(9, 300), 4.0, boundaries=(100,))
    for name, number in (("0", 0), ("1", 1), ("2", 2), ("more", 9)):
        found.finish(name, text(number, 300), 5.0)
    assert quiet(found)


@pytest.mark.parametrize("more", [{}, {"grid": 1, "buffers": 0}, {"grid": 1, "buffers": 0, "page": 1}])
def test_a_pass_that_gives_back_one_state_saves_no_boundary(more: dict[str, int]) -> None:
    for step, hit in ((1, 128), (0, 0)):
        found = server(step=step, **more)
        found.arrive("", text(1, 300), 0.0, boundaries=(128,))
        found.finish("", text(1, 300), 1.0)
        assert found.lookup(np.concatenate((text(1, 200), text(2, 90))), 2.0) == hit
        assert quiet(found)


def test_what_is_evicted_for_a_contest_is_so_at_its_time_in_the_log() -> None:
    found = _Timed(MODEL, Shape(8, 20_000), "forecast")
    for number in range(6):
        found.arrive("", text(number, 200), float(number))
        found.finish("", text(number, 200), float(number))
    found.times = deque([7.5, 7.5, 9.0])
    request = found.decisions.arrive("", text(50, 300), 7.0, 0, 0)
    found.weakest(PoolKind.STATES, found.decisions.contenders(request, {128: 128, 192: 192}, 7.0), 2, 7.0)
    assert list(found.times) == [9.0]


@pytest.mark.parametrize("more", [{"grid": 1, "buffers": 0, "step": 128}, {"step": 64, "chunk_tokens": 1000}])
def test_the_state_just_before_a_branch_counts_as_the_branch_wherever_states_lie(more: dict[str, int]) -> None:
    """Behind a prefix that is resumed at a state off its end, as those of Mamba-2 kernels are."""
    found, template = server(**more), text(1, 300)
    for number in range(3):
        found.commit(np.concatenate((template, text(number + 2, 200))), 490, float(number))
    (node,) = [node for node in walk(found.tree) if node.end == 256]
    assert node.state is not None
    assert node.state.shared


def test_templates_stay_while_their_questions_go_where_states_lie_between_their_ends() -> None:
    trace, hits = parse("fewshot?requests=300&seed=3"), {}
    for policy in ("forecast", "lru"):
        found = SimulatedServer(MODEL, Shape(16, 400_000, grid=1, step=128, buffers=0), policy)
        hits[policy] = 0
        for r in trace.requests:
            hits[policy] += found.lookup(r.input_tokens, r.ts)
            found.commit(r.tokens, r.n_input, r.ts)
    assert hits["forecast"] / trace.n_input_tokens > 0.65
