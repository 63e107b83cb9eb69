"""The dashboard, the alert rules and the smoke test ask for series that the installed SGLang or we export."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from benchmarks.serving.monitoring import expressions, selectors
from sglang_hybrid.engine.series import EVENTS, SERIES
from sglang_hybrid.prefix.misses import REASONS

ROOT = Path(__file__).parents[2]
ASKED = expressions()
NAME = re.compile(r"sglang:\w+")
OURS = {series.name: series for series in SERIES}
RANKS = {"model_name", "instance", "job"}
VALUES = {"reason": set(REASONS), "event": set(EVENTS), "kind": {"kv", "state", "map", "unmap", "grow"}}
"""What the labels of ours can be."""


@pytest.fixture(scope="module")
def exported() -> dict[str, str]:
    """Kind of every metric that SGLang's collectors and we declare, by name."""
    spec = importlib.util.find_spec("sglang")  # finds, does not import
    assert spec is not None
    assert spec.submodule_search_locations
    text = (Path(spec.submodule_search_locations[0]) / "srt/observability/metrics_collector.py").read_text()
    declared = re.findall(r'(\w+)\(\s*(?:#[^\n]*\n\s*)*name="(sglang:\w+)"', text)
    return {name: kind for kind, name in declared} | {name: series.kind.title() for name, series in OURS.items()}


def series_of(metric: str, kind: str) -> set[str]:
    """What Prometheus stores for one metric."""
    if kind == "Histogram":
        return {f"{metric}_bucket", f"{metric}_sum", f"{metric}_count"}
    return {metric if kind == "Gauge" or metric.endswith("_total") else f"{metric}_total"}


@pytest.mark.parametrize("place", ASKED)
def test_expressions_name_exported_series(place: str, exported: dict[str, str]) -> None:
    stored = {"up"}.union(*(series_of(name, kind) for name, kind in exported.items()))
    named = {selector.partition("{")[0] for selector in selectors(ASKED[place])}
    assert named
    assert named <= stored


@pytest.mark.parametrize("place", ASKED)
def test_labels_of_ours_exist_and_can_have_the_values_asked_for(place: str) -> None:
    for selector in selectors(ASKED[place]):
        name, _, matchers = selector.partition("{")
        own = set(OURS[name].labels) if name in OURS else set()
        for label, sort, values in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
            assert name not in OURS or label in own | RANKS, selector
            if label in own:
                assert set(values.split("|")) <= VALUES[label], (selector, sort)
    grouped = {label for labels in re.findall(r"\bby \(([^)]*)\)", ASKED[place]) for label in labels.split(", ")}
    named = {NAME.match(each)[0] for each in selectors(ASKED[place]) if NAME.match(each)}  # type: ignore[index]
    ours = set().union(*(OURS[name].labels for name in named if name in OURS))
    assert grouped <= ours | RANKS | {"le"}, ASKED[place]


def test_every_panel_is_for_the_chosen_models_where_its_series_say_which() -> None:
    text = (ROOT / "docker/grafana/dashboards/sglang-hybrid.json").read_text()
    unnamed = {name for name in re.findall(r"(sglang:\w+)(?!\w)(?!{model_name)", text) if f"({name}, " not in text}
    assert unnamed == {"sglang:evicted_tokens_total"}, "SGLang gives that one no model_name"


def test_dashboard_covers_what_an_operator_of_a_hybrid_model_needs() -> None:
    named = set(NAME.findall(" ".join(ASKED.values())))
    assert {
        "sglang:cache_hit_rate",
        "sglang:mamba_usage",
        "sglang:full_token_usage",
        "sglang:time_to_first_token_seconds_bucket",
        "sglang:num_queue_reqs",
        "sglang:mamba_cache_miss_tokens_total",
        "sglang:mamba_cache_events_total",
        "sglang:elastic_memory_granules_used",
        "sglang:elastic_memory_transfers_total",
        "sglang:elastic_memory_granules_resident",
    } <= named


def test_smoke_test_names_exported_metrics(exported: dict[str, str]) -> None:
    named = set(NAME.findall((ROOT / "docker/smoke.py").read_text()))
    assert named
    assert named <= set(exported)


def test_rates_are_taken_of_counters_and_quantiles_of_histograms(exported: dict[str, str]) -> None:
    for query in ASKED.values():
        for name in NAME.findall(query):
            kind = exported.get(name) or exported[name.removesuffix("_bucket")]
            assert ("rate(" + name in query or "increase(" + name in query) == (kind != "Gauge"), query


def test_windows_hold_samples_whatever_the_version() -> None:
    """Prometheus 3 leaves out the sample at the left end: a window of two scrapes would hold one."""
    scrape = re.search(r"scrape_interval: (\d+)s", (ROOT / "docker/prometheus.yml").read_text())
    assert scrape is not None
    windows = {
        int(n) * {"s": 1, "m": 60}[unit] for q in ASKED.values() for n, unit in re.findall(r"\[(\d+)([sm])\]", q)
    }
    assert min(windows) >= 4 * int(scrape[1])
