"""Requests that give their memory to a more urgent one wait again, whether that one is admitted or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.cache.hooks import keep_preempted


@pytest.mark.parametrize("admitted", [False, True])
def test_a_preempted_request_is_not_lost(admitted: bool) -> None:
    stays, leaves, urgent = (SimpleNamespace(rid=rid) for rid in ("stays", "leaves", "urgent"))
    running, scheduler = SimpleNamespace(reqs=[stays, leaves]), SimpleNamespace(waiting_queue=[urgent])
    scheduler.enable_priority_preemption = True
    scheduler._add_request_to_queue = scheduler.waiting_queue.append

    def walk(scheduler: Any, running_batch: Any) -> tuple[Any, Any]:
        """SGLang's: it puts a request back that was preempted if anybody was admitted."""
        running_batch.reqs = [stays]
        if not admitted:
            return None, running_batch
        scheduler.waiting_queue[:] = [leaves]
        return "a batch", running_batch

    found = keep_preempted(walk, scheduler, running_batch=running)
    assert found == ("a batch" if admitted else None, running)
    assert scheduler.waiting_queue == ([leaves] if admitted else [urgent, leaves])
