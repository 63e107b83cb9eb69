"""Data parallelism: a request goes to the replica, or group of attention, that was sent most of its prompt before.

SGLang hands requests round. Of N replicas one has the conversation that goes on, so N - 1 of N next turns find nothing.
Runs in SGLang's data-parallel controller, which is before all replicas, and behind all HTTP processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang_hybrid.engine.frontend.settings import settings
from sglang_hybrid.routing.replicas import Load, Replicas

READ_EVERY_S = 0.02
"""As SGLang does for its own methods of balancing."""


def by_prefix(original: Callable[..., Any], controller: Any, req: Any) -> Any:
    """AROUND hook of DataParallelController.round_robin_scheduler, which handles what no `routed_dp_rank` names."""
    if req.routed_dp_rank is None and _wanted(controller.server_args) and getattr(req, "input_ids", None) is not None:
        req.routed_dp_rank = _chosen(controller, req)  # None leaves it to SGLang
    return original(controller, req)


def forget(controller: Any, message: Any) -> None:
    """BEFORE hook of DataParallelController.send_control_message: what empties the caches is on its way to all of them.

    Whether a replica could do it is not known here: one that could not misses the next turn of a conversation, at most.
    """
    emptied = type(message).__name__.startswith(("FlushCache", "UpdateWeight", "ReleaseMemoryOccupation"))
    replicas = getattr(controller, "hybrid_replicas", None)
    if emptied and getattr(message, "flush_cache", True) and replicas is not None:
        replicas.forget()


def _wanted(server_args: Any) -> bool:
    config = settings()
    return (
        config.backend == "hybrid"
        and config.dp_routing == "prefix"
        and not server_args.disable_radix_cache
        and server_args.disaggregation_mode == "null"
    )


def _chosen(controller: Any, req: Any) -> int | None:
    import numpy as np

    replicas = getattr(controller, "hybrid_replicas", None)
    if replicas is None:
        replicas = controller.hybrid_replicas = Replicas()
        controller.hybrid_read_at = float("-inf")
    if (now := time.monotonic()) - controller.hybrid_read_at >= READ_EVERY_S:
        controller.hybrid_read_at = now
        replicas.hear({load.dp_rank: _load(load) for load in controller.load_snapshot_reader.read_all()})
    apart = [getattr(req, name, None) for name in ("lora_id", "extra_key", "cache_salt")]
    salt = None if apart == [None] * 3 else repr(apart)
    ids = np.asarray(req.input_ids, dtype=np.int64) & 0x7FFFFFFF  # what stands for an image may be longer
    return replicas.choose(ids, salt, [rank for rank in controller._active_workers if controller.status[rank]])


def _load(said: Any) -> Load:
    requests = said.num_running_reqs + said.num_waiting_reqs
    most = said.max_running_requests or 1 << 30
    return Load(said.timestamp, requests, said.num_waiting_uncached_tokens, said.max_total_num_tokens or 1 << 20, most)
