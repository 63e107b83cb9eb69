"""The dashboard and the smoke test ask for series that the installed SGLang exports."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERIES = re.compile(r"sglang:[a-z0-9_]+")


@pytest.fixture(scope="module")
def exported() -> dict[str, str]:
    """Kind of every metric that SGLang's collectors declare, by name."""
    spec = importlib.util.find_spec("sglang")  # finds, does not import
    assert spec is not None
    assert spec.submodule_search_locations
    text = (Path(spec.submodule_search_locations[0]) / "srt/observability/metrics_collector.py").read_text()
    declared = re.findall(r'(\w+)\(\s*(?:#[^\n]*\n\s*)*name="(sglang:\w+)"', text)
    return {name: kind for kind, name in declared}


def series_of(metric: str, kind: str) -> set[str]:
    """What Prometheus stores for one metric."""
    if kind == "Histogram":
        return {f"{metric}_bucket", f"{metric}_sum", f"{metric}_count"}
    return {metric if kind == "Gauge" or metric.endswith("_total") else f"{metric}_total"}


def queries() -> list[str]:
    dashboard = json.loads((ROOT / "docker/grafana/dashboards/sglang-hybrid.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [*asked, *(variable["definition"] for variable in dashboard["templating"]["list"])]


@pytest.mark.parametrize("query", queries())
def test_dashboard_query_names_exported_series(query: str, exported: dict[str, str]) -> None:
    stored = set().union(*(series_of(name, kind) for name, kind in exported.items()))
    named = set(SERIES.findall(query))
    assert named
    assert named <= stored


def test_dashboard_covers_what_an_operator_of_a_hybrid_model_needs() -> None:
    named = set(SERIES.findall(" ".join(queries())))
    assert {
        "sglang:cache_hit_rate",
        "sglang:mamba_usage",
        "sglang:full_token_usage",
        "sglang:time_to_first_token_seconds_bucket",
        "sglang:num_queue_reqs",
    } <= named


def test_smoke_test_names_exported_metrics(exported: dict[str, str]) -> None:
    named = set(SERIES.findall((ROOT / "docker/smoke.py").read_text()))
    assert named
    assert named <= set(exported)


def test_rates_are_taken_of_counters_and_quantiles_of_histograms(exported: dict[str, str]) -> None:
    for query in queries():
        for name in SERIES.findall(query):
            kind = exported.get(name) or exported[name.removesuffix("_bucket")]
            assert ("rate(" + name in query or "increase(" + name in query) == (kind != "Gauge"), query
