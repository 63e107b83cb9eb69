"""Where a server that prefills has the numbers of the pages that it sends."""

from __future__ import annotations

from typing import Any


def at_hand(_: Any, req: Any, *__: Any, **___: Any) -> None:
    """BEFORE hook of the sending of a chunk, on a CPU: they are on the host.

    From 0.5.22 SGLang copies them into page-locked memory behind an event of CUDA, which ends the scheduler here.
    """
    req.disagg_kv_sender.supports_host_tensor_indices = False
