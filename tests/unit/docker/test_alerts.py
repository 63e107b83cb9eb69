"""The alert rules: well-formed, each tested to fire and to stay silent, and telling what to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CASES = Path(__file__).with_name("alerts_test.yml")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((ROOT / "docker/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_says_how_bad_what_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) >= 8
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "{{ $labels." in rule["annotations"]["summary"], "which server or model"


def test_every_alert_is_tested_to_fire() -> None:
    cases = yaml.safe_load(CASES.read_text())
    fired = str(cases["tests"][-1]["promql_expr_test"])
    assert all(f'alertname="{rule["alert"]}"' in fired for rule in rules())
    silent = [case for case in cases["tests"] if case["promql_expr_test"][0]["exp_samples"] == []]
    assert [case["promql_expr_test"][0]["expr"] for case in silent] == ["ALERTS"] * 2


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", str(ROOT / "docker/alerts.yml")),
        ("check", "config", str(ROOT / "docker/prometheus.yml")),
        ("test", "rules", str(CASES)),
    ],
    ids=["rules", "config", "cases"],
)
def test_promtool_agrees(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
