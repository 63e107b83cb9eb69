"""The processes of an engine in somebody's own: they live as long as it, from their first line on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from sglang_hybrid.core.process import bound
from sglang_hybrid.engine.processes import replicas
from tests.engine.support import PATIENCE_S, eventually

BOUND = """
import multiprocessing, sys, threading, time
from sglang_hybrid.core.process import die_with_parent
from sglang_hybrid.engine.processes import stop

def serve(told):
    die_with_parent()
    told.send("up")
    time.sleep(3600)

def start():
    global child, told
    told, other = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(other,), daemon=True)
    with stop.held_back_in_spawned():
        child.start()
    told.recv()

if __name__ == "__main__":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    child.join(2)
    print("alive", child.is_alive(), flush=True)
    if sys.argv[1:]:
        import os, signal
        os.kill(child.pid, signal.SIGINT)
        child.join(2)
        print("after Ctrl-C", child.is_alive())
"""


def test_children_of_a_thread_live_as_long_as_the_process(tmp_path: Any) -> None:
    """The kernel takes the thread that started a process for its parent. Nor are they ended by Ctrl-C."""
    script = tmp_path / "bound.py"
    script.write_text(BOUND)
    done = subprocess.run(
        [sys.executable, script, "ctrl-c"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stdout.splitlines() == ["alive True", "after Ctrl-C True"], done.stderr


IMPORTING = """
import multiprocessing, os, signal, sys, time
from sglang_hybrid.engine.processes import stop

if __name__ == "__mp_main__":  # a child that still imports, as those of SGLang do for seconds
    print(os.getpid(), flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    with stop.held_back_in_spawned():
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1,), daemon=True).start()
    signal.pause()
"""


CONTROLLED = """
import multiprocessing, os, signal, threading, time
from sglang_hybrid.engine.processes import stop

spawned = multiprocessing.get_context("spawn").Process

def start():
    spawned(target=time.sleep, args=(1,)).start()
    time.sleep(3600)

def control():  # as SGLang's data-parallel controller, with a thread for each scheduler
    os.environ["CONTROLLED"] = "1"
    stop.bind_spawned()
    threading.Thread(target=start).start()
    signal.pause()

if __name__ == "__mp_main__" and "CONTROLLED" in os.environ:  # a scheduler that still imports
    print(os.getpid(), flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    with stop.held_back_in_spawned():
        spawned(target=control).start()
    signal.pause()
"""


@pytest.mark.parametrize("source", [IMPORTING, CONTROLLED])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_children_end_with_a_script_that_is_ended_while_they_import(tmp_path: Any, source: str, number: int) -> None:
    """SGLang binds them to it after their imports: too late, and its detokenizer stayed, or schedulers of replicas."""
    script = tmp_path / "importing.py"
    script.write_text(source)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        child = psutil.Process(int(started.stdout.readline()))
        started.send_signal(number)
        started.wait(PATIENCE_S)
        ended = eventually(lambda: not replicas.lives(child), 0.01)
        if not ended:
            child.kill()
    assert (ended, started.returncode) == (True, -number)


@pytest.mark.parametrize(("parent", "said"), [(os.getpid, "served"), (os.getppid, "")])
def test_a_child_whose_parent_is_gone_does_nothing(monkeypatch: pytest.MonkeyPatch, parent: Any, said: str) -> None:
    is_announced = parent()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: is_announced)
        code = bound("print('served', end='')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (said, "", 0 if said else 1)
