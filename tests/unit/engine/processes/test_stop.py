"""Which process of a server a signal ends, and what is said of one that died."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sglang_hybrid.engine import backend
from sglang_hybrid.engine.processes import stop
from tests.engine.support import eventually


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ([None, -9], "killed detokenizer, most often for memory: lower"),
        ([-9, -9], "killed scheduler_0, detokenizer, most often for memory"),
        ([-7, None], "A bus error ended scheduler_0, most often because /dev/shm is full"),
        ([1, None], "Its own message stands above."),
        ([None, None], "Its own message stands above."),  # it reports its exception before it ends
        ([-15, None], "Its own message stands above."),
        (None, "Its own message stands above."),  # an HTTP worker watches nobody
    ],
)
def test_only_a_kill_is_taken_for_lack_of_memory(
    caplog: pytest.LogCaptureFixture, statuses: list[int | None] | None, said: str
) -> None:
    watchdog = None
    if statuses is not None:
        processes = [SimpleNamespace(exitcode=status) for status in statuses]
        watchdog = SimpleNamespace(_names=["scheduler_0", "detokenizer"], _processes=processes)
    with caplog.at_level(logging.ERROR):
        backend.explain_dead_child(SimpleNamespace(tokenizer_manager=SimpleNamespace(_subprocess_watchdog=watchdog)))
    assert said in caplog.text
    assert ("memory" in caplog.text) == ("memory" in said)


CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc")


def a_container_can_be_had() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*CONTAINER, "true"], stderr=-3).returncode == 0


@pytest.mark.skipif(not a_container_can_be_had(), reason="this user may have no process namespace of its own")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_process_of_a_container_ends_too(number: signal.Signals, status: int) -> None:
    """The kernel drops a signal that would end it: its children were killed, and it went on."""
    code = "import time; from sglang_hybrid.engine.processes import stop\nwith stop.quick_end():\n"
    code += " print('up', flush=True); time.sleep(30)"
    with subprocess.Popen([*CONTAINER, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        psutil.Process(process.pid).children()[0].send_signal(number)
        assert process.wait() == status


def test_a_command_of_a_child_that_starts_outlives_signals_to_the_group() -> None:
    command = ["sh", "-c", "kill -TERM $$; echo it ends"]
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.check_output(command)
    assert stop.without_signals(subprocess.check_output, command, text=True) == "it ends\n"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_child_outlives_signals_to_the_group_and_can_repeat_them() -> None:
    """The worker's own handler, which comes later, sees what came before it; once."""
    script = """
import os, signal
from sglang_hybrid.engine.processes import stop
from tests.engine.support import eventually
stop.leave_to_parent()
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getpid(), signal.SIGTERM)
seen = []
signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
stop.repeat_missed()
stop.repeat_missed()
print(sorted(seen))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[2, 15]"


def test_a_child_that_is_still_starting_holds_signals_back(tmp_path: Path) -> None:
    """From the first instruction of its Python; without the mask it ends in its own start-up, with a traceback."""
    main = tmp_path / "launcher.py"
    main.write_text("""
import multiprocessing, os, signal, sys, time
from sglang_hybrid.engine.processes import stop

if __name__ == "__mp_main__":
    time.sleep(0.5)
    stop.leave_to_parent()

def work(): print("served", stop._missed, flush=True)

if __name__ == "__main__":
    stop.hold_back_in_children()
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    os.kill(child.pid, signal.SIGINT)
    child.join()
    sys.exit(child.exitcode)
""")
    done = subprocess.run([sys.executable, main], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "served [2]\n", "")


def test_ctrl_c_is_not_lost_in_the_import_of_what_ends_the_children() -> None:
    """A handler that fails raises in whatever it interrupted, and imports like to go on without what failed."""
    script = """
import os, signal, sys
from sglang_hybrid.engine.processes import stop
with stop.quick_end():
    for name in ("Process", "NoSuchProcess"):
        delattr(sys.modules["psutil"], name)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except Exception:
        pass
    print("serves on")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (stop.INTERRUPTED, "")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ctrl_c_takes_the_children_along() -> None:
    script = """
import os, signal, subprocess
from sglang_hybrid.engine.processes import stop
from tests.engine.support import eventually
with stop.quick_end():
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (stop.INTERRUPTED, "")
    assert eventually(lambda: gone(int(done.stdout)))  # a killed process takes a moment to end


@pytest.mark.parametrize(
    ("before", "status", "left"),
    [
        ("SIGTERM", -signal.SIGTERM, False),
        ("SIGHUP", -signal.SIGTERM, False),
        ("SIGHUP ignored, as by nohup", 0, True),
    ],
)
def test_a_signal_during_the_start_leaves_no_file(tmp_path: Path, before: str, status: int, left: bool) -> None:
    number, _, ignored = before.partition(" ")
    script = f"""
import os, signal
from sglang_hybrid.engine.processes import leftovers, stop
signal.signal(signal.SIGHUP, signal.SIG_IGN if {bool(ignored)} else signal.SIG_DFL)
with stop.quick_end():
    leftovers._mine.append((os.getpid(), {str(tmp_path / "socket")!r}))
    open({str(tmp_path / "socket")!r}, "w").close()
    os.kill(os.getpid(), signal.{number})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (status, "")
    assert (tmp_path / "socket").exists() == left


@pytest.mark.parametrize("streams", ["sys.stdout = None", "os.dup2(pipe, 1)", "os.dup2(full, 1)", "sys.stderr.close()"])
def test_a_server_that_cannot_go_on_ends_wherever_its_output_goes(streams: str) -> None:
    """It went on without its children: what is raised in a handler of a signal is only logged by an event loop."""
    script = f"""
import os, sys
from sglang_hybrid.engine.processes import stop
there, pipe = os.pipe()
os.close(there)
full = os.open("/dev/full", os.O_WRONLY)
{streams}
try:
    print("kept in a buffer", file=sys.stdout or open(os.devnull, "w"))
    stop.end_with_status(lambda *_, **__: None, os.getpid())
finally:
    os._exit(7)
"""
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE)
    assert done.returncode == stop.DIED


@pytest.mark.parametrize(("asked", "status"), [(True, 0), (False, stop.DIED)])
def test_a_server_that_kills_itself_says_whether_it_was_told_to_stop(asked: bool, status: int) -> None:
    script = f"""
import os
from sglang_hybrid.engine.processes import stop
stop.asked.set({asked})
stop.end_with_status(lambda *_, **__: None, os.getpid())
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == status


def test_a_closed_terminal_is_not_for_the_children() -> None:
    script = """
import os, signal
from sglang_hybrid.engine.processes import stop
with stop.held_back():
    os.kill(os.getpid(), signal.SIGHUP)
    stop.leave_to_parent()
os.kill(os.getpid(), signal.SIGHUP)
stop.repeat_missed()
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


def test_the_first_of_several_http_processes_keeps_what_says_that_a_process_died() -> None:
    script = """
import signal
from types import SimpleNamespace
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors.multiprocess import Multiprocess
from sglang_hybrid.engine.processes import stop
def ends(number, frame): pass
signal.signal(signal.SIGQUIT, ends)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
supervisor = Multiprocess.__new__(Multiprocess)
stop.keep_handlers(Multiprocess.__init__, supervisor, SimpleNamespace(workers=2), [])
assert signal.getsignal(signal.SIGQUIT) is ends
assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "that one is uvicorn's"
supervisor.processes += [SimpleNamespace(exitcode=0), SimpleNamespace(exitcode=None)]
assert stop.status() == 0
supervisor.processes += [SimpleNamespace(exitcode=STARTUP_FAILURE)]
assert stop.status() == stop.DIED, "a worker never served"
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


@pytest.mark.parametrize(
    ("does", "told", "said"),
    [("conn.recv(); conn.send(True); time.sleep(900)", [], True), ("conn.recv()", [], False),
     ("time.sleep(900)", [signal.SIGTERM], True)],
)  # fmt: skip
def test_nobody_waits_for_the_answer_of_a_worker_that_ends(
    does: str, told: list[int], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=exec, args=(does, {"conn": its, "time": time}))
    process.start()
    monkeypatch.setattr(stop, "_supervisors", [SimpleNamespace(signal_queue=told)])
    try:
        worker = SimpleNamespace(parent_conn=ours, process=process)
        assert stop.answers(lambda *_: True, worker, 1e9) is said
    finally:
        process.kill()
        process.join()


def test_the_handler_of_before_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop.quick_end():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
