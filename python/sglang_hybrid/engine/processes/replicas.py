"""Data-parallel replicas: the controller that starts their schedulers, and what it does not see of them.

SGLang's watchdog watches the controller alone, which never looks at them either. Of a server that lost a scheduler,
requests to the others hung too, and SIGTERM did not end it; one that lost it while weights were loaded, for memory say,
waited for it without end (0.5.17 to 0.5.23).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_CONTROLLER, _SCHEDULER = "sglang::data_parallel_controller", "sglang::scheduler"


def lives(process: Any) -> bool:
    """Whether psutil's `process` runs; a zombie, which has no memory and which nobody waits for, does not."""
    import psutil  # of SGLang's packages

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


class Replica:
    """A scheduler as the watchdog asks for it: a process that another one started."""

    def __init__(self, process: Any, name: str) -> None:
        self.pid, self.name = process.pid, name
        self._process = process

    def is_alive(self) -> bool:
        return lives(self._process)

    @property
    def exitcode(self) -> int:
        """As of `multiprocessing`: the negative signal that ended it; 0 for one that is gone without a trace."""
        try:
            status = int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(" ")[2])
        except (OSError, ValueError):
            return 0
        return -(status & 0x7F) or status >> 8


def watch(watchdog: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook of `SubprocessWatchdog._check_processes`: what a data-parallel controller started counts."""
    if getattr(watchdog, "hybrid_replicas", False):
        return
    found = [replica for process in watchdog._processes for replica in _replicas(process.pid)]
    watchdog.hybrid_replicas = True  # all are there before it starts
    watchdog._processes = [*watchdog._processes, *found]
    watchdog._names = [*watchdog._names, *[replica.name for replica in found]]


def _replicas(pid: int | None) -> list[Replica]:
    import psutil

    try:
        controller = psutil.Process(pid)
        if _title(controller) != _CONTROLLER:
            return []
        below = [(child, _title(child)) for child in controller.children(recursive=True)]
    except psutil.Error:
        return []
    return [Replica(child, title.removeprefix("sglang::")) for child, title in below if title.startswith(_SCHEDULER)]


def _title(process: Any) -> str:
    return " ".join(process.cmdline()).strip("\0 ")


def control(*args: Any, **kwargs: Any) -> None:
    """What a controller of replicas runs: SGLang's, with plugins, which SGLang loads in all processes but this one.

    A copy of the first process has them. On a GPU, and in `Engine`, it is spawned: requests were handed round there.
    """
    from sglang.srt.managers import data_parallel_controller
    from sglang.srt.plugins import load_plugins

    load_plugins()
    data_parallel_controller.run_data_parallel_controller_process(*args, **kwargs)


def wait_for_the_living(original: Callable[..., Any], controller: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of DataParallelController.launch_tensor_parallel_group: a scheduler that ends is not waited for."""
    ready = threading.Event()
    watched = threading.Thread(target=_end_alike, args=(controller.scheduler_procs, ready), daemon=True)
    watched.start()
    try:
        return original(controller, *args, **kwargs)
    finally:
        ready.set()


def _end_alike(schedulers: Sequence[Any], ready: threading.Event) -> None:
    """Until `ready`: end this process as one of the `schedulers` did. The first process tells why, by its status."""
    while not ready.wait(_LOOK_S):
        for each in [each for each in schedulers if each is not None and not each.is_alive()]:
            logger.error("A scheduler (pid %d) ended with status %s before it served", each.pid, each.exitcode)
            if (each.exitcode or 0) < 0:
                signal.raise_signal(-each.exitcode)
            os._exit(each.exitcode or 1)
