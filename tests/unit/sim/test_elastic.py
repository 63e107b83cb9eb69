"""A simulated server with one budget: memory changes its kind, by whole columns, and a log of it is played again."""

import random
from pathlib import Path

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.memory.sizing import Kinds, Sizing
from sglang_hybrid.prefix.log_schema import BUDGET, SHAPE
from sglang_hybrid.prefix.request_log import RecordedDecisions, RequestLog
from sglang_hybrid.prefix.tree.tokens import as_tokens
from sglang_hybrid.sim.concurrent import serve
from sglang_hybrid.sim.elastic import ElasticServer
from sglang_hybrid.sim.live import simulate
from sglang_hybrid.sim.shape import Shape
from sglang_hybrid.sim.workloads import parse
from tests.prompts import text

MODEL = ModelSpec("toy", kv_bytes_per_token=256, checkpoint_bytes=16_000, flops_per_token=1e6, flops_per_token_pair=10)
KINDS = Kinds(kv_row_bytes=64, kv_planes=4, page_tokens=64, state_bytes=16_000)
GRANULE = 16_384
"""A column of KV is four pages and four granules, a state is one granule."""


def server(granules: int = 60, **more: int) -> ElasticServer:
    sizing = Sizing(KINDS, GRANULE, granules * GRANULE, request_states=2)
    shape = {"chunk_tokens": 256, "page": 64, **more}
    return ElasticServer(MODEL, Shape(sizing.states, sizing.tokens, **shape), sizing)


def test_states_leave_for_kv_and_kv_for_states() -> None:
    found = server()
    for number in range(60):
        found.commit(text(number, 66), 65, float(number))
        found.check()
    short = found.tree.states
    assert short > 20
    found.commit(text(100, 2401), 2400, 100.0)
    found.check()
    assert found.tree.states < short / 2
    assert found.tree.kv_tokens >= 2368
    for number in range(60):
        found.commit(text(200 + number, 66), 65, 200.0 + number)
    found.check()
    assert found.tree.states >= short - 2
    assert found.lookup(text(100, 2400), 300.0) < 2368


def test_a_page_that_leaves_makes_no_room_for_a_state_while_its_column_is_in_use() -> None:
    found = server()
    for number in range(4):
        found.commit(text(number, 66), 65, float(number))  # a page and a state each: all in one column
    kv = found.claims.holdings.budget.pools["kv"]
    assert kv.columns.live_columns == 2, "one is that of the page for padding, with three more"
    found.claims.holdings.release_held()
    free = found.free_states
    assert found.claims.evict_one(("kv",)) == 64 * 256 + GRANULE
    assert found.free_states == free + 1, "the state's own"
    for _ in range(3):
        found.claims.evict_one(("kv",))
    assert found.free_states == free + 4 + 4
    found.check()


@pytest.mark.parametrize("page", [1, 64])
def test_side_by_side_all_are_served_and_everything_is_given_back(page: int) -> None:
    sizing = Sizing(Kinds(64, 4, page, 16_000), GRANULE, 700 * GRANULE, request_states=2)
    found = ElasticServer(MODEL, Shape(sizing.states, sizing.tokens, page=page), sizing)
    hits = serve(parse("sharegpt?seed=3&sessions=10"), found, 4, tokens_per_s=2.0)
    assert hits.sum() > 0
    found.check()
    assert not found.running


def recorded(path: Path, requests: int) -> list[int]:
    """Tokens hit by each of some requests of a server, which writes its log to `path`."""
    found, rng, hits, past = server(), random.Random(4), [], [[]]
    sizing = found.sizing
    budget = (sizing.total_bytes, GRANULE, KINDS.kv_row_bytes, KINDS.kv_planes, KINDS.state_bytes, 2)
    shape = {name: getattr(found.shape, name) for name in SHAPE} | {"states": 0, "kv_tokens": 0}
    log = RequestLog(path, 1 << 24)
    settings = shape | dict(zip(BUDGET, budget, strict=True))
    found.decisions = RecordedDecisions(log, MODEL, "forecast", grid=64, shape=settings)
    for number in range(requests):
        base = rng.choice(past[-6:])
        prompt = as_tokens([*base, *text(number, rng.randrange(20, 300)).tolist()])
        hits.append(found.arrive(str(number), prompt, float(number)))
        answer = text(number + 1000, rng.choice((0, 9, 70)))
        found.decode(str(number), answer.size, float(number))
        past.append([*prompt.tolist(), *answer.tolist()][:900])
        found.finish(str(number), as_tokens([*prompt.tolist(), *answer.tolist()]), float(number))
    log.close()
    return hits


def test_a_log_says_what_memory_its_server_had(tmp_path: Path) -> None:
    log = tmp_path / "requests.log"
    hits = recorded(log, 80)
    again = simulate(log)
    assert again.served == again.simulated == hits
    assert sum(hits) > 4000
    assert simulate(log, "lru").different > 0
    pools = simulate(log, states=12, kv_tokens=4096)
    assert pools.served == hits
    assert pools.different > 0
    with pytest.raises(ConfigError, match="sizes of both pools"):
        simulate(log, states=12)


def test_memory_that_is_too_small_or_of_other_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="pages of 1 tokens: 64"):
        ElasticServer(MODEL, Shape(20, 4000), server().sizing)
    found = server(granules=30)
    found.arrive("one", text(1, 1200), 0.0)
    with pytest.raises(ConfigError, match="larger budget"):
        found.arrive("other", text(2, 1200), 0.0)
    found.commit(text(3, 9000), 8000, 0.0)
    assert found.lookup(text(3, 9000), 1.0) == 0, "as SGLang refuses what can never run"
