"""Creation off the critical path: a thread that keeps physical granules at hand."""

import logging
import threading

from sglang_hybrid.core.errors import HybridError
from sglang_hybrid.device.backing import PooledBacking

logger = logging.getLogger(__name__)


class Prefaulter:
    """Keeps `pooled` unmapped granules ready in `backing`, which wakes it when half of them were taken, or fewer than
    `least` are left.

    Use it as a context manager, or `start` and `stop` it. A failure (the machine is out of memory) is kept in `error`,
    said once, and ends the attempt, not the thread: the next `wake` tries again. What is mapped, and when, never
    depends on this thread, only how long mapping takes.
    """

    def __init__(self, backing: PooledBacking, pooled: int, least: int = 0) -> None:
        self.backing = backing
        self.pooled = pooled
        self._wake_at = max(pooled // 2, least - 1)
        self.error: HybridError | None = None
        self._changed = threading.Condition()
        self._asked = self._served = 0  # wakes so far, and how many of them have been served
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="granule-prefault", daemon=True)

    def start(self) -> None:
        """Begin, and fill the pool up for the first time."""
        self._thread.start()
        self.backing.on_taken = self._taken
        self.wake()

    def stop(self) -> None:
        """End the thread; granules at hand stay."""
        self.backing.on_taken = None
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> "Prefaulter":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def wake(self) -> None:
        """Ask for the pool to be filled up again; returns at once."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Block until the last wake has been served, or the thread was stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._served == self._asked or self._stopping)

    def _taken(self) -> None:
        if self.backing.at_hand <= self._wake_at:
            self.wake()

    def _run(self) -> None:
        self.backing.driver.bind()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._served != self._asked or self._stopping)
                if self._stopping:
                    return
                asked = self._asked
            try:
                self.backing.prefault(self.pooled)
                self.error = None
            except HybridError as error:
                if self.error is None:
                    logger.warning("no memory can be made ahead of need, so requests wait while pools grow: %s", error)
                self.error = error
            with self._changed:
                self._served = asked
                self._changed.notify_all()
