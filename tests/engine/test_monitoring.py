"""What the dashboard and the alert rules ask for is there, under a load that makes every series move."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as read

from benchmarks.serving import monitoring
from sglang_hybrid.demo.server import Server
from sglang_hybrid.engine.series import SERIES
from tests.engine.support import PATIENCE_S, Client, eventually

pytestmark = [pytest.mark.engine, pytest.mark.slow]

INSTALLED = shutil.which("prometheus") is not None

Samples = list[tuple[str, dict[str, str], float]]


@pytest.fixture(scope="module")
def client(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("monitoring") / "server.log"
    with Server(models("gdn"), monitoring.FLAGS, log=log, environment=monitoring.ENVIRONMENT) as server:
        server.wait_ready(PATIENCE_S)
        yield Client(server)


@pytest.fixture(scope="module")
def before(client: Client) -> Samples:
    return samples(client)


@pytest.fixture(scope="module")
def prometheus(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[monitoring.Prometheus | None]:
    """It scrapes the server from before the load on; None where it is not installed."""
    if not INSTALLED:
        yield None
        return
    target = f"127.0.0.1:{client.server.port}"
    with monitoring.Prometheus(target, tmp_path_factory.mktemp("prometheus")) as running:
        assert eventually(running.answers)
        yield running


@pytest.fixture(scope="module")
def after(client: Client, before: Samples, prometheus: monitoring.Prometheus | None) -> Samples:
    monitoring.load(client)
    assert eventually(lambda: total(samples(client), "sglang:elastic_memory_calls_total", kind="unmap") > 0)
    return samples(client)


def samples(client: Client) -> Samples:
    families = read(client.get("/metrics"))
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def total(page: Samples, wanted: str, **labels: str) -> float:
    """The sum of a name's samples with these labels."""
    return sum(value for name, has, value in page if name == wanted and labels.items() <= has.items())


def matched(page: Samples, selector: str) -> Samples:
    """The samples that a selector of PromQL chooses."""
    wanted, _, matchers = selector.partition("{")
    tests = re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers)

    def fits(labels: dict[str, str]) -> bool:
        return all(
            (re.fullmatch(value if "~" in sort else re.escape(value), labels.get(label, "")) is not None)
            == (not sort.startswith("!"))
            for label, sort, value in tests
        )

    return [sample for sample in page if sample[0] == wanted and fits(sample[1])]


@pytest.mark.parametrize("place", monitoring.expressions())
def test_every_series_of_an_expression_is_exposed(after: Samples, place: str) -> None:
    for selector in monitoring.selectors(monitoring.expressions()[place]):
        assert selector.startswith("up{") or matched(after, selector), selector


def test_our_series_are_labelled_as_sglangs(before: Samples) -> None:
    (theirs,) = [labels for name, labels, _ in before if name == "sglang:max_total_num_tokens"]
    assert theirs["model_name"] == monitoring.NAME
    assert {"engine_type", "tp_rank", "pp_rank", "moe_ep_rank"} < set(theirs)
    names = {name for name, _, _ in before}
    for series in SERIES:
        assert series.name in names, "before anything happened, so that the first time is seen as a change"
        for _, labels, _ in matched(before, series.name):
            assert {key: value for key, value in labels.items() if key not in series.labels} == theirs


def test_what_happened_is_counted(before: Samples, after: Samples) -> None:
    grew = {
        (name, *(value for key, value in labels.items() if key in ("reason", "event", "kind")))
        for name, labels, value in after
        if value > total(before, name, **labels)
    }
    for reason in ("never_seen", "branch_pending", "below_granularity"):
        assert ("sglang:mamba_cache_miss_tokens_total", reason) in grew
    assert {("sglang:mamba_cache_miss_tokens_total", each) for each in ("state_evicted", "kv_evicted")} & grew
    for event in ("boundaries", "planned", "written", "states_evicted"):
        assert ("sglang:mamba_cache_events_total", event) in grew
    for name in ("transfers", "evictions", "granules_moved", "calls", "seconds"):
        assert [each for each in grew if each[0] == f"sglang:elastic_memory_{name}_total"], name
    assert ("sglang:num_retracted_requests_total",) in grew
    missed = total(after, "sglang:mamba_cache_miss_tokens_total")
    computed = total(after, "sglang:prompt_tokens_total") - total(after, "sglang:cached_tokens_total")
    assert missed >= computed > 0, "a request that gave its memory back is counted again"


@pytest.mark.skipif(not INSTALLED, reason="prometheus is not installed: apt-get install prometheus")
@pytest.mark.usefixtures("after")
def test_a_real_prometheus_answers_every_expression(prometheus: monitoring.Prometheus) -> None:
    waiting = monitoring.expressions()

    def answered() -> bool:
        for place, expression in list(waiting.items()):
            # Nothing is wrong: of an alert only what it reads is there.
            asked = monitoring.selectors(expression) if place.startswith("alert") else [expression]
            if all(prometheus.series(each) for each in asked):
                del waiting[place]
        return not waiting

    assert eventually(answered, every_s=1.0), waiting
    groups = prometheus.get("rules")["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}
