"""Copies between the device and a host tier that end late: within one memory they are over when they begin.

A copy to the host reads the device when it ends; one to the device has junk in its place until a pass waits for it, and
is acknowledged later still. Whoever reads or reuses memory before its time is found as a wrong state.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

JUNK = 7.0
LONGEST = 60
"""Turns of the loop after which a copy has ended."""


class _End:
    """In place of a device's event: it comes some turns of the loop later, or when somebody waits for it."""

    def __init__(self, server: Any, turns: int, copy: Callable[[], Any]) -> None:
        self._server, self._due, self._copy = server, server.turns + turns, copy

    def query(self) -> bool:
        ended = bool(self._server.turns >= self._due)
        if ended:
            self.synchronize()
        return ended

    def synchronize(self) -> None:
        copy, self._copy = self._copy, lambda: None
        copy()


def put_off(server: Any, seed: int) -> None:
    """Let the copies of `server`, a SimulatedScheduler, end late."""
    from sglang.srt.managers.cache_controller import LayerDoneCounter
    from sglang.srt.mem_cache.l2_transfer import L2TransferEngine, TransferCompletion

    random, due = Random(seed), list[Callable[[], Any]]()
    write, load = L2TransferEngine.submit_device_to_host, L2TransferEngine.submit_host_to_device
    wait = LayerDoneCounter.wait_until

    def ending(copy: Callable[[], Any]) -> Any:
        server.counts["late_copies"] += 1
        end = _End(server, random.choice((0, 1, 2, 5, 20, LONGEST)), copy)
        return TransferCompletion(end, end, False)

    def loaded() -> None:
        while due:
            due.pop(0)()

    def load_late(engine: Any, transfers: list[Any], **more: Any) -> Any:
        for transfer in transfers:
            for rows in _buffers(transfer.device_pool):
                rows[transfer.device_indices.long()] = JUNK
        due.append(lambda: load(engine, transfers, **more))
        return ending(loaded)

    def waiting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            loaded()
            return original(*given, **more)

        return call

    L2TransferEngine.submit_device_to_host = lambda *given: ending(lambda: write(*given))
    L2TransferEngine.submit_host_to_device = load_late
    LayerDoneCounter.wait_until = waiting(wait)
    for model in server.models:  # each layer of a real one waits for its own
        model.forward = waiting(model.forward)


def _buffers(pool: Any) -> list[Any]:
    """Tensors of `pool` by row."""
    held = getattr(pool, "mamba_cache", None)
    if held is not None:
        return [each.transpose(0, 1) for each in (held.temporal, *held.conv)]
    return list(getattr(pool, "full_kv_pool", pool).k_buffer)
