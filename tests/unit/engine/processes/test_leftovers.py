"""What SGLang leaves in `/dev/shm`, and who removes it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue
from sglang.srt.utils import common

from sglang_hybrid.engine.processes import leftovers


def test_the_memory_between_ranks_has_no_name_once_all_have_it_open() -> None:
    """24 MiB of it stayed behind every server of several ranks, whose ranks are killed at its end."""
    writer = MessageQueue(1, 1)
    file = Path("/dev/shm") / writer.buffer.shared_memory.name
    reader = MessageQueue.create_from_handle(pickle.loads(pickle.dumps(writer.export_handle())), 0)
    assert file.exists()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(MessageQueue.wait_until_ready, (writer, reader)))
    for queue in (reader, writer):
        leftovers.unname(None, queue)
    leftovers.unname(None, writer)  # once is enough, wherever the hook is in place already
    assert not file.exists()
    writer.enqueue({"requests": [1, 2, 3]})
    assert reader.dequeue() == {"requests": [1, 2, 3]}
    for queue in (reader, writer):
        queue.local_socket.context.destroy(0)


def test_the_first_process_removes_what_the_controller_of_replicas_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one is killed: five files for each replica stayed behind every server of several."""
    for name in ("_mine", "_told", "_held"):
        monkeypatch.setattr(leftovers, name, [])
    files = [tmp_path / name for name in ("tokenizer", "input of a replica")]
    ports = [
        SimpleNamespace(tokenizer_ipc_name=f"ipc://{file}", nccl_port=5, tcp="tcp://127.0.0.1:5", instance_id="none")
        for file in files
    ]
    leftovers.note(ports[0])
    first = list(leftovers._mine)
    for file in files:
        file.touch()
    leftovers.tell(None, None, ports[0])  # what follows runs in the controller
    leftovers.note(ports[1])
    monkeypatch.setattr(leftovers, "_mine", first)
    leftovers.remove()
    assert list(tmp_path.iterdir()) == []


NOTES = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from sglang_hybrid.engine.processes import leftovers

def note(name):
    file = Path(os.environ["TMPDIR"], name)
    file.touch()
    leftovers.note(SimpleNamespace(tokenizer_ipc_name=f"ipc://{file}", instance_id=name))

if __name__ == "__main__":
    note(sys.argv[1])
    print("noted", flush=True)
    if "wait" in sys.argv:
        sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL if "kill" in sys.argv else signal.SIGCONT)
"""


def test_the_next_start_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    script, folder = tmp_path / "notes.py", tmp_path / "folder"
    script.write_text(NOTES)
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    start = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    with start([sys.executable, script, "lives", "wait"]) as lives:
        assert lives.stdout.readline() == "noted\n"
        others = folder / "sglang-hybrid-files-of-somebody"
        others.write_text(f"{folder / 'lives'}\n")
        others.chmod(0o666)
        with start([sys.executable, script, "killed", "kill"]) as killed:
            assert killed.wait() == -signal.SIGKILL
        assert {"lives", "killed"} < {file.name for file in folder.iterdir()}
        outside = tmp_path / "outside"
        outside.touch()
        (record,) = (file for file in folder.glob("sglang-hybrid-files-*") if "killed" in file.read_text())
        record.write_text(record.read_text() + f"{outside}\n{folder / 'metrics'}\n")
        (folder / "metrics").mkdir()
        (folder / "metrics" / "counter.db").touch()
        with start([sys.executable, script, "next"]) as after:
            assert after.wait() == 0
        assert {file.name for file in folder.iterdir()} - {others.name} == {"lives", *named(folder, "lives")}
        assert outside.exists()
        lives.communicate("\n")
    assert [file.name for file in folder.iterdir()] == [others.name]


def named(folder: Path, name: str) -> set[str]:
    """The file in which it is written down that a process named `name`."""
    return {file.name for file in folder.glob("sglang-hybrid-files-*") if f"/{name}\n" in file.read_text()} - {
        "sglang-hybrid-files-of-somebody"
    }


def test_a_server_that_ends_at_once_leaves_no_folder_of_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would remove it at its own end, which a server of which a process died never comes to."""
    monkeypatch.setattr(leftovers, "_mine", [(os.getpid(), str(tmp_path / "socket"))])
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))  # whoever sets it keeps that one
    monkeypatch.setattr(common, "prometheus_multiproc_dir", None, raising=False)
    common.set_prometheus_multiproc_dir()
    folder = Path(common.prometheus_multiproc_dir.name)
    (folder / "counter_1.db").touch()
    leftovers._mine[0] = (os.getppid(), "")
    leftovers.remove()
    assert folder.exists(), "it belongs to the process of which this one is a copy"
    leftovers._mine[0] = (os.getpid(), "")
    leftovers.remove()
    assert not folder.exists()
    assert tmp_path.exists()


def test_the_first_process_removes_what_its_http_workers_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_mine", [])
    monkeypatch.setattr(leftovers, "_routers", [])
    arguments = Path(f"/dev/shm/multi_tokenizer_args_{os.getpid()}")
    router = SimpleNamespace(all_worker_ipcs=set[str]())
    leftovers.note_workers(None, router)
    files = [tmp_path / "one", tmp_path / "other", arguments]
    for file in files:
        file.touch()
    router.all_worker_ipcs |= {f"ipc://{file}" for file in files[:2]}  # each worker registers itself later
    leftovers.remove()
    assert [file for file in files if file.exists()] == []
