"""Who is asked to compute which cold segments, and that a request goes on whatever others do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.frontend.segments import parallel, plans, warming
from sglang_hybrid.engine.frontend.segments.local import Local, Mean, name
from sglang_hybrid.engine.frontend.segments.parallel import Parallel
from sglang_hybrid.engine.frontend.segments.peers import NotKept, Refused
from sglang_hybrid.engine.frontend.tokenization import processing
from tests.unit.engine.frontend.segments.sharing import Other, Server, document, prompt, served

pytestmark = pytest.mark.skipif(not compat.complete(), reason="segments are refused before the start with this SGLang")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    return partial(served, monkeypatch)


def test_cold_segments_are_shared_out(serve: Callable[..., Server]) -> None:
    others = Other(), Other()
    server = serve(*others, kept=[document(2)])
    server.run(*map(document, range(7)))
    shares = [server.computed, *(other.asked for other in others)]
    assert sorted(map(len, shares)) == [2, 2, 2]
    assert sorted(each for share in shares for each in share) == [
        document(number) for number in range(7) if number != 2
    ]


def test_a_second_prompt_over_them_asks_nobody(serve: Callable[..., Server]) -> None:
    other = Other()
    server = serve(other)
    server.run(document(0), document(1))
    server.run(document(1), document(0))
    server.run(document(1, 63), document(0))
    assert (server.questions, other.probes, len(other.asked)) == (1, 1, 1)
    server.run(document(1), document(0), cache_salt="another tenant")
    assert other.probes == 2
    server.parallel.forget()
    server.run(document(0), document(1))
    assert other.probes == 3


def test_few_tokens_and_a_lone_segment_are_computed_here(serve: Callable[..., Server]) -> None:
    other = Other()
    server = serve(other)
    server.run(document(0, 500))
    assert (server.questions, other.probes) == (0, 0)
    server.run(document(1, 3000))
    assert (server.questions, other.probes, other.asked, server.computed) == (0, 1, [], [])


def test_a_busy_server_gives_its_segments_away(serve: Callable[..., Server]) -> None:
    busy, idle = Other(waiting=5000), Other()
    server = serve(busy, idle)
    waits = SimpleNamespace(finished=False, time_stats=SimpleNamespace(first_token_time=0.0))
    server.manager.rid_to_state["r"] = waits
    server.parallel.local.begin(server.manager, "r", 9000)
    server.run(document(0), document(1))
    assert (busy.asked, len(idle.asked), server.computed) == ([], 2, [])
    waits.time_stats.first_token_time = 1.0
    assert server.parallel.local.waiting(server.manager) == 0


def test_what_another_has_is_fetched_where_that_is_known_to_be_quicker(serve: Callable[..., Server]) -> None:
    kept = name(document(0), {})
    other = Other(held=lambda each: each == kept)
    server = serve(other)
    server.parallel.local.pace.add(1e-3)
    other.transfer.add(1e-5)
    server.run(document(0), document(1))
    assert (other.asked, server.computed) == ([document(0)], [document(1)])
    for _ in range(40):
        other.transfer.add(2e-3)
        other.pace.add(2e-3)
    server.parallel.local.forget()
    server.run(document(0), document(1))
    assert len(other.asked) == 1, "it is quicker to compute both here"


def test_this_server_may_be_among_the_others(serve: Callable[..., Server]) -> None:
    itself = Other(server="here")
    server = serve(itself)
    server.run(document(0), document(1))
    server.run(document(2), document(3))
    assert (itself.is_self, itself.probes, server.questions) == (True, 1, 0), "nobody is asked when nobody is left"


@pytest.mark.parametrize("error", [Refused("busy"), OSError("gone"), TimeoutError(), KeyError("tokens"), EOFError()])
def test_a_server_that_fails_is_left_alone_for_a_while(serve: Callable[..., Server], error: Exception) -> None:
    other = Other()

    async def fail() -> None:
        raise error

    other.does = fail
    server = serve(other)
    server.run(*map(document, range(4)))
    assert len(server.computed) == 2, "the rest is computed by the request itself"
    assert other.is_out
    server.run(*map(document, range(4, 8)))
    assert other.probes == 1
    other._until = 0.0
    other.does = lambda: asyncio.sleep(0)
    server.run(*map(document, range(8, 12)))
    assert (other.probes, len(other.asked)) == (2, 4)


def test_what_finds_no_room_here_is_no_fault_of_the_other(serve: Callable[..., Server]) -> None:
    other = Other()

    async def fail(_: Any) -> None:
        raise NotKept("it is worth less than all that is kept")

    other.keep = fail  # type: ignore[method-assign]
    server = serve(other)
    server.run(document(0), document(1))
    assert not other.is_out


def test_nobody_waits_for_ever(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PATIENCE_S", 0.01)
    other = Other()
    other.does = lambda: asyncio.sleep(3600)
    server = serve(other)
    server.run(document(0), document(1))
    assert len(server.computed) == 1
    assert (other.is_out, other.why) == (True, "TimeoutError: nothing came within 0.0 s")


def test_what_is_computed_ahead_in_vain_is_no_error(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(Other())

    async def full(*_: Any, **__: Any) -> None:
        raise ValueError("the queue is full")

    monkeypatch.setattr(warming, "warm", full)
    server.run(document(0), document(1))
    assert server.parallel.local.pace.value is None


def test_two_requests_that_want_the_same_have_it_made_once(serve: Callable[..., Server]) -> None:
    other = Other()
    server = serve(other)

    async def both() -> None:
        go = asyncio.Event()
        other.does = go.wait
        first = asyncio.create_task(server.have(document(0), document(1)))
        while not other.asked:
            await asyncio.sleep(0)
        second = asyncio.create_task(server.have(document(1), document(0)))
        await asyncio.sleep(0.02)
        assert not first.done()
        assert not second.done(), "it waits for what the first has made"
        go.set()
        await asyncio.gather(first, second)

    asyncio.run(both())
    assert len(other.asked) + len(server.computed) == 2
    assert not server.parallel._making


def test_what_another_request_began_meanwhile_is_not_made_twice(serve: Callable[..., Server]) -> None:
    others = Other(), Other()
    server = serve(*others)

    async def both() -> None:
        await asyncio.gather(*(server.have(document(0), document(1), document(2)) for _ in range(5)))

    asyncio.run(both())
    assert sum(len(other.asked) for other in others) + len(server.computed) == 3


def test_a_measurement_does_not_last() -> None:
    now = 5.0
    mean = Mean(lambda: now)
    assert mean.value is None
    mean.add(10.0)
    mean.add(0.0)
    assert mean.value == 7.0
    now += 601
    assert mean.value is None
    mean.add(1.0)
    assert mean.value == 1.0


def test_paces_are_learned_from_idle_servers(serve: Callable[..., Server]) -> None:
    other = Other()
    server = serve(other)
    server.run(*map(document, range(2)))
    assert server.parallel.local.pace.value is not None
    assert other.pace.value is not None
    busy = Other(waiting=100)
    server = serve(busy)
    server.run(*map(document, range(4)))
    assert busy.asked
    assert busy.pace.value is None


def test_names_that_nobody_asks_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_hybrid.engine.frontend.segments.local.MOST_NAMES", 3)
    local = Local()
    for each in "abca":
        local.sight(each)
    local.sight("d")
    assert [local.has(each) for each in "abcd"] == [True, False, True, True]


def test_what_waits_is_not_counted_for_ever() -> None:
    local, manager = Local(), SimpleNamespace(rid_to_state={})
    for number in range(5000):
        local.begin(manager, str(number), 7)
    assert len(local._waiting) <= 1025
    assert local.waiting(manager) == 0


# Which requests it is for.


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, configure: Callable[..., None]) -> list[tuple[Any, ...]]:
    """The prompts that are prepared, in a server with another."""
    configure(segments="on", segment_peers="http://a:1, http://b:2/")
    monkeypatch.setattr(parallel, "_parallel", None)
    seen: list[tuple[Any, ...]] = []

    async def prepare(_: Any, __: Any, *asked: Any) -> None:
        seen.append(asked)
        if asked[0][0] == 666:
            raise RuntimeError("a bug")

    monkeypatch.setattr(Parallel, "prepare", prepare)
    return seen


IDS, RANGES = prompt(document(0), document(1))


def tokenized(ids: list[int] | None = IDS, **fields: Any) -> Any:
    params = SimpleNamespace(custom_params={"segments": [list(each) for each in RANGES]})
    return SimpleNamespace(**{"rid": "r", "input_ids": ids, "sampling_params": params, **fields})


def goes_by(made: Any, single: bool | None = True, ahead: bool = False) -> None:
    manager = SimpleNamespace(server_args=SimpleNamespace(admin_api_key=None, api_key="k"), rid_to_state={})

    async def original(*_: Any) -> Any:
        return made

    async def run() -> Any:
        parallel.outer.set(None if single is None else SimpleNamespace(is_single=single))
        warming.here.set(ahead)
        return await processing.tokenize(original, manager, SimpleNamespace(rid="r"))

    assert asyncio.run(run()) is made


def test_a_prompt_of_a_client_is_prepared(named: list[tuple[Any, ...]]) -> None:
    goes_by(tokenized(cache_salt="s", extra_key=None))
    assert named == [(IDS, tuple(RANGES), {"cache_salt": "s"})]
    found = parallel.of_this_process(None)
    assert found is not None
    assert [peer.url for peer in found.peers] == ["http://a:1", "http://b:2"]
    assert found.told()[0] == {"url": "http://a:1", "fetched": 0, "is_self": False, "why_not": None}


def test_others_are_not(named: list[tuple[Any, ...]]) -> None:
    goes_by(tokenized(), single=False)
    goes_by(tokenized(), single=None)
    goes_by(tokenized(), ahead=True)
    goes_by(tokenized(ids=None))
    goes_by(tokenized(return_logprob=True, logprob_start_len=0))
    goes_by(tokenized(return_hidden_states=True))
    goes_by(tokenized(mm_inputs=object()))
    goes_by(tokenized(session_params=object()))
    goes_by(tokenized(sampling_params=SimpleNamespace(custom_params=None)))
    assert named == []


def test_a_fault_of_ours_is_no_fault_of_the_request(named: list[tuple[Any, ...]]) -> None:
    goes_by(tokenized(ids=[666, *IDS[1:]]))
    assert len(named) == 1


def test_an_abort_while_it_is_prepared_is_not_lost(
    named: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(abort_sent=False, dispatched=False, finished=False)
    keys, told = SimpleNamespace(admin_api_key=None, api_key=None), list[str]()
    manager = SimpleNamespace(server_args=keys, rid_to_state={"r": state}, abort_request=told.append)

    async def prepare(*_: Any) -> None:
        state.abort_sent = True
        await asyncio.sleep(3600)

    monkeypatch.setattr(Parallel, "prepare", prepare)

    async def run() -> None:
        parallel.outer.set(SimpleNamespace(is_single=True))
        await parallel.prepared(manager, tokenized())
        state.dispatched = True
        await asyncio.sleep(0.05)

    asyncio.run(run())
    assert (told, state.abort_sent) == (["r"], False)
