"""What `doctor --url` says of a router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_hybrid.cluster.numbers import Numbers
from sglang_hybrid.cluster.prompts import UNKNOWN, Pages
from sglang_hybrid.cluster.status import describe
from sglang_hybrid.cluster.worker import Worker
from sglang_hybrid.routing.index import NOTHING, Reach


def test_a_routers_workers_and_what_it_knows() -> None:
    one, two = Worker("http://10.0.0.1:30000", healthy=True, running=3, waiting_tokens=4096), Worker("http://b:1")
    workers: Any = SimpleNamespace(all={worker.url: worker for worker in (one, two)})
    numbers = Numbers(workers)
    for _ in range(20):
        numbers.routed(0.001, Pages(1000, ()), Reach(640, 640))
    numbers.routed(0.001, UNKNOWN, NOTHING)
    numbers.retries.inc()
    findings = {finding.subject: finding for finding in describe(numbers.text().decode())}
    assert findings["10.0.0.1:30000"].value == "3 requests, 4,096 prompt tokens to compute"
    assert findings["10.0.0.1:30000"].problem is None
    assert "http://b:1" in str(findings["b:1"].problem)
    assert findings["requests"].value.startswith("21 sent to a worker, 1 of them")
    assert findings["foretold"].value.startswith("64.0 % of 20,000")
    assert findings["unknown prompts"].problem is None
    for _ in range(3):
        numbers.routed(0.001, UNKNOWN, NOTHING)
    findings = {finding.subject: finding for finding in describe(numbers.text().decode())}
    assert "--hybrid-state-events" in str(findings["unknown prompts"].problem)


def test_other_pages_are_none_of_a_router() -> None:
    assert describe("") == []
    assert describe('sglang:num_running_reqs{model_name="m"} 1.0\n') == []
