"""Our series carry SGLang's labels, are the listed ones, and have the same names for every Prometheus."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest, make_asgi_app
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine import publish
from sglang_hybrid.engine.cache.metrics import Account, Exported
from sglang_hybrid.engine.frontend.reporting import scrapes
from sglang_hybrid.engine.pools import telemetry
from sglang_hybrid.engine.series import CALLS, ELASTIC, EVENTS, POOLS, SERIES, Series
from sglang_hybrid.memory.sizing import segment_layout
from sglang_hybrid.prefix.misses import REASONS
from sglang_hybrid.segment.index import Counts
from tests.unit.engine.pools.arenas import opened
from tests.unit.engine.surface_scan import PACKAGE

LABELS = {"model_name": "a/b", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3_LEGACY = PROMETHEUS_3.replace("allow-utf-8", "underscores")
"""With `metric_name_validation_scheme: legacy`."""


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Values by name and the series' own label; its other labels are LABELS."""
    found = {}
    for family in read_text(generate_latest(registry).decode()):
        for sample in family.samples:
            own = {key: value for key, value in sample.labels.items() if key not in LABELS}
            assert {key: value for key, value in sample.labels.items() if key in LABELS} == LABELS
            found[sample.name, *own.values()] = sample.value
    return {key: value for key, value in found.items() if not key[0].endswith("_created")}


def test_every_reason_and_event_is_there_before_it_happens_and_counts_after() -> None:
    registry = CollectorRegistry()
    told = Exported(LABELS, registry)
    names = ("sglang:mamba_cache_miss_tokens_total", "sglang:mamba_cache_miss_requests_total")
    expected = {(name, reason) for name in names for reason in REASONS}
    expected |= {("sglang:mamba_cache_events_total", event) for event in EVENTS}
    assert samples(registry) == dict.fromkeys(expected, 0.0)
    account = Account(SimpleNamespace(), on_miss=told.miss, on_event=told.event)
    account.request(10, 4, {"refused": 6}, 0.0)
    account.request(10, 7, {"refused": 3}, 0.0)
    account.event("written", 2)
    found = samples(registry)
    assert [found[name, "refused"] for name in names] == [9.0, 2.0]
    assert found["sglang:mamba_cache_events_total", "written"] == 2.0
    assert sum(found.values()) == 13.0


def test_events_that_the_code_counts_are_listed() -> None:
    text = "".join(path.read_text("utf-8") for path in (PACKAGE / "engine").rglob("*.py"))
    of_segments = {f"segments_{field.name}" for field in dataclasses.fields(Counts)}
    assert set(re.findall(r'event\("(\w+)"', text)) | of_segments == set(EVENTS)


def test_elastic_figures_are_the_listed_series() -> None:
    arena, driver = opened(HostDriver, lambda: 0.0, page_tokens=1, total_bytes=1 << 20)
    arena.open(segment_layout(arena.sizing.granule_bytes, arena.sizing.granule_bytes, 1 << 20))
    registry = CollectorRegistry()
    export = telemetry.exporter(LABELS, registry)
    export(telemetry.figures(arena, Counter(memory_waits=7, memory_evicted_kv=1)))
    export(telemetry.figures(arena, Counter(memory_waits=9, memory_evicted_kv=1)))
    arena.pooled.close()
    driver.close()
    found = samples(registry)
    listed: set[tuple[str, ...]] = set()
    for series in SERIES:
        if series.name.startswith(ELASTIC):
            of_pools = (series.name, "kv") in found
            listed |= (
                {(series.name, kind) for kind in (POOLS if of_pools else CALLS)} if series.labels else {(series.name,)}
            )
    assert set(found) == listed
    assert found["sglang:elastic_memory_waits_total",] == 9.0, "a total, not the sum of what was told"
    assert found["sglang:elastic_memory_evictions_total", "kv"] == 1.0
    assert found["sglang:elastic_memory_granules_budget",] > 0


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_names_follow_the_conventions(series: Series) -> None:
    assert series.name.startswith("sglang:")
    assert series.name.endswith("_total") == (series.kind == "counter")
    assert series.text.endswith(".")
    assert set(series.labels) <= {"reason", "event", "kind"}


@pytest.fixture
def published() -> Iterator[None]:
    before = publish._labels
    yield
    publish._labels = before


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(
    ("leads", "labels", "expected"),
    [
        (True, {"model_name": "m", "tp_rank": 0, "pp_rank": 0}, {"model_name": "m", "tp_rank": "0", "pp_rank": "0"}),
        (False, {"model_name": "m", "tp_rank": 1, "pp_rank": 0}, None),
        (True, {"model_name": "m", "tp_rank": 0, "pp_rank": 1}, None),
        (True, {"model_name": "m", "tp_rank": 4, "dp_rank": 1}, {"model_name": "m", "tp_rank": "4", "dp_rank": "1"}),
        (True, None, None),
    ],
    ids=["first", "second of a group", "second stage", "first of a replica", "without metrics"],
)
def test_one_rank_of_each_group_publishes(leads: bool, labels: Any, expected: Any) -> None:
    collector = None if labels is None else SimpleNamespace(labels=labels)
    publish.learn_labels(SimpleNamespace(collector=collector, is_stats_logging_rank=leads))
    assert publish.labels() == expected


def scrape(accept: str | None) -> tuple[str, str]:
    """Content type and text of the page that a server with our hook gives."""
    registry = CollectorRegistry()
    Gauge("sglang:cache_hit_rate", "Theirs.", ["model_name"], registry=registry).labels("a b/c").set(0.5)
    Exported(LABELS, registry)
    app = SimpleNamespace(routes=[SimpleNamespace(app=make_asgi_app(registry=registry))])
    scrapes.keep_names(None, app)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"x")] + ([] if accept is None else [(b"Accept", accept.encode())])
    asyncio.run(app.routes[0].app({"type": "http", "method": "GET", "headers": headers}, receive, send))
    kinds = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return kinds["content-type"], sent[1]["body"].decode()


@pytest.mark.parametrize(
    "accept", [None, "*/*", "text/plain;version=0.0.4", PROMETHEUS_2, PROMETHEUS_3, PROMETHEUS_3_LEGACY]
)
def test_every_prometheus_sees_the_same_names(accept: str | None) -> None:
    kind, page = scrape(accept)
    assert kind.startswith("application/openmetrics-text") == (accept == PROMETHEUS_3)
    read = read_openmetrics if accept == PROMETHEUS_3 else read_text
    names = {sample.name for family in read(page) for sample in family.samples if not sample.name.endswith("_created")}
    assert names == {
        "sglang:cache_hit_rate",
        "sglang:mamba_cache_miss_tokens_total",
        "sglang:mamba_cache_miss_requests_total",
        "sglang:mamba_cache_events_total",
    }
