"""Children that are copies of the first process, and when they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.support import eventually
from tests.unit.engine.processes.test_stop import gone

LAUNCHER = """
import multiprocessing, os, signal, sys, threading, time
from sglang_hybrid.core.process import announce_parent, die_with_announced_parent
from sglang_hybrid.engine.processes import children, stop

if __name__ == "__mp_main__":
    stop.leave_to_parent()
    die_with_announced_parent()

imported = []

def work(ready):
    handlers = [signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGINT)]
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    ready.send((imported, handlers[0] == signal.SIG_DFL, callable(handlers[1]), masked, os.getppid()))
    time.sleep(60)

if __name__ == "__main__":
    BEFORE
    stop.hold_back_in_children()
    announce_parent()
    multiprocessing.set_start_method("spawn", force=True)
    children.copy_instead_of_spawn()
    signal.signal(signal.SIGQUIT, lambda *_: None)
    imported.append("a model")
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.Process(target=work, args=(writer,))
    child.start()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    found, quits, outlives, masked, parent = reader.recv()
    os.kill(child.pid, signal.SIGINT)
    os.kill(child.pid, signal.SIGTERM)
    print(found, quits, outlives, masked, parent == os.getpid(), child.is_alive(), child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere children are spawned")
@pytest.mark.parametrize(
    ("before", "copied"),
    [
        ("pass", True),
        ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", False),
        (
            "multiprocessing.set_executable(os.path.join(os.path.dirname(sys.executable), '.', 'python'))",
            False,
        ),  # as for a NUMA node
    ],
    ids=["one thread", "two threads", "another executable"],
)
def test_a_child_is_a_copy_only_where_that_is_safe(tmp_path: Path, before: str, copied: bool) -> None:
    """Either way it outlives signals to the group, and ends with its parent, even one that was killed."""
    main = tmp_path / "launcher.py"
    main.write_text(LAUNCHER.replace("BEFORE", before))
    done = subprocess.run([sys.executable, main], capture_output=True, text=True, timeout=60, check=False)
    said, pid = done.stdout.rsplit(maxsplit=1)
    assert said == f"{['a model'] if copied else []} True True set() True True", done.stderr
    assert (done.returncode, done.stderr) == (-9, "")
    assert eventually(lambda: gone(int(pid)))


THREADS = """
import multiprocessing, os
from sglang_hybrid.core.process import announce_parent
from sglang_hybrid.engine.processes import children

children.keep_one_thread()
import torch

def work():
    print(torch.get_num_threads(), flush=True)

if __name__ == "__main__":
    assert children.can_be_copied()
    announce_parent()
    children.copy_instead_of_spawn()
    for said in ("1", "3,1", "nonsense"):
        os.environ["OMP_NUM_THREADS"] = said
        child = multiprocessing.Process(target=work)
        child.start()
        child.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere children are spawned")
def test_a_copy_computes_with_as_many_threads_as_were_asked_for(tmp_path: Path) -> None:
    """Threads of two servers that wait for work while they spin take each other's cores."""
    main = tmp_path / "launcher.py"
    main.write_text(THREADS)
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, main], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.stdout.split() == ["1", "3", "2"], done.stderr
