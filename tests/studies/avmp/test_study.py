import numpy as np
import pytest

from avmp.elastic_replay import ElasticReplay, layer_major, page_major, per_layer_pages
from avmp.geometry import GEOMETRIES
from avmp.intervals import paired_delta, paired_ratio
from avmp.pressure import AvmpConfig
from avmp.published import TwoStores
from avmp.queue import ByteGranular, ColumnGranular, StoresServer, serve
from avmp.replay import replay
from avmp.workloads import Request, generate, sharegpt_prompts
from sglang_hybrid.core.errors import ConfigError

JAMBA, MAMBA2 = GEOMETRIES["jamba_1_5_mini"], GEOMETRIES["mamba2_1b3"]
GIB = 1 << 30


def test_elastic_kills_nobody_and_finishes_more_in_one_footprint():
    ours = ElasticReplay(JAMBA, GIB)
    trace = generate("uniform_short", 0)
    outcome = replay(ours, trace, JAMBA)
    published = replay(TwoStores(JAMBA, GIB, 0.5, AvmpConfig(), oversized=True), trace, JAMBA)
    assert outcome.killed == 0
    assert outcome.intact == outcome.requests - outcome.oom == 77
    assert outcome.intact > 1.3 * published.intact
    assert outcome.reserved_bytes <= 1.02 * GIB
    ours.elastic.check()
    assert ours.budget.used == 0


@pytest.mark.parametrize("layouts", [per_layer_pages, page_major])
@pytest.mark.parametrize("geometry", [JAMBA, MAMBA2])
def test_the_queue_comes_within_a_percent_of_the_ideal(geometry, layouts):
    trace = generate("sharegpt", 0)
    for lockstep in (False, True):
        ideal = serve(ByteGranular(geometry, GIB, lockstep), trace)
        ours = serve(ElasticReplay(geometry, GIB, layouts, lockstep=lockstep), trace)
        assert ours.dropped == ideal.dropped == 0
        assert ideal.makespan <= ours.makespan <= 1.01 * ideal.makespan


@pytest.mark.parametrize("lockstep", [False, True])
def test_layer_major_comes_within_a_percent_of_what_its_granule_allows(lockstep):
    trace = generate("uniform_short", 0)
    bytes_alone = serve(ByteGranular(JAMBA, GIB, lockstep), trace)
    columns = serve(ColumnGranular(JAMBA, GIB, layer_major(JAMBA, GIB, 2 << 20), lockstep), trace)
    ours = serve(ElasticReplay(JAMBA, GIB, layer_major, lockstep=lockstep), trace)
    assert bytes_alone.makespan < columns.makespan <= ours.makespan <= 1.01 * columns.makespan


def test_the_ideal_at_a_granule_counts_whole_columns():
    layouts = layer_major(JAMBA, GIB, 2 << 20)  # KV columns of 1,024 tokens, 16 MiB; state columns of 8, 56 MiB
    requests = [Request(index, 1000, 24, 0) for index in range(9)]
    assert serve(ColumnGranular(JAMBA, (8 * 16 + 56) << 20, layouts), requests).makespan == 2 * 1024
    assert serve(ColumnGranular(JAMBA, (9 * 16 + 2 * 56) << 20, layouts), requests).makespan == 1024
    assert serve(ColumnGranular(JAMBA, 71 << 20, layouts), requests).dropped == 9
    with pytest.raises(ConfigError, match="share no granule"):
        ColumnGranular(JAMBA, GIB, page_major(JAMBA, GIB, 2 << 20))


def test_the_queue_serves_in_order_and_drops_what_can_never_run():
    size = JAMBA.request_bytes(100 + 10)
    requests = [Request(0, 100, 10, 0), Request(1, 100, 10, 1), Request(2, 100_000, 10, 2), Request(3, 100, 10, 3)]
    service = serve(ByteGranular(JAMBA, size), requests)
    assert (service.makespan, service.served, service.dropped) == (330, 3, 1)
    assert service.tokens_per_tick == 1.0
    two = serve(ByteGranular(JAMBA, 2 * size), requests)
    assert two.makespan == 220


def test_static_stores_drop_what_exceeds_their_share():
    requests = [Request(0, 20_000, 10, 0)]
    size = JAMBA.request_bytes(20_010)
    assert serve(StoresServer(TwoStores(JAMBA, 2 * size, 0.5)), requests).dropped == 0
    assert serve(StoresServer(TwoStores(JAMBA, 2 * size, 0.9)), requests).dropped == 1
    avmp = TwoStores(JAMBA, 2 * size, 0.9, AvmpConfig(), oversized=True)
    assert serve(StoresServer(avmp), requests).dropped == 0
    assert avmp.counters["rebalances"] > 0


def test_workloads_are_reproducible_and_shaped_as_described():
    assert generate("mixed_long", 0) == generate("mixed_long", 0) != generate("mixed_long", 1)
    uniform = generate("uniform_short", 0)
    assert len(uniform) == 512
    assert all(128 <= r.prompt <= 1024 and 64 <= r.gen <= 256 for r in uniform)
    assert [r.arrival for r in uniform[:3]] == [0, 1, 2]
    bursts = generate("agentic_burst", 0)
    assert bursts[-1].arrival < 40
    prompts = sharegpt_prompts()
    assert 24 <= np.median(prompts) <= 26
    assert 0.34 < (prompts <= 16).mean() < 0.39
    assert 780 <= np.percentile(prompts, 95) <= 840
    own = generate("sharegpt", 0, prompts=np.array([77]))
    assert {r.prompt for r in own} == {77}


def test_intervals():
    same = paired_delta([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (same.point, same.low, same.high, same.pairs) == (0.0, 0.0, 0.0, 3)
    assert not same.excludes(0.0)
    ratio = paired_ratio([2.0, 4.0, 6.0, 8.0], [1.0, 2.0, 3.0, 4.0])
    assert (ratio.point, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    assert ratio.excludes(1.0)
    spread = paired_delta([5.0, 1.0, 4.0, 2.0], [0.0, 2.0, 1.0, 1.0])
    assert spread.low < spread.point < spread.high
