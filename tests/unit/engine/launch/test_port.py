"""The port of a server that starts: nobody else starts on it, from its first second on."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid import launch_server
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.process import free_port
from sglang_hybrid.engine.launch import port
from tests.engine.configs import QWEN3_NEXT, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there are no such names elsewhere")

HOST = "127.0.0.1"
OTHER = """
import sys
from sglang_hybrid.engine.launch import port

port.take("127.0.0.1", int(sys.argv[1]))
print("taken", flush=True)
sys.stdin.read()
"""
COPY = """
import multiprocessing, os, signal, sys, time
from sglang_hybrid.core.process import announce_parent
from sglang_hybrid.engine.launch import port
from sglang_hybrid.engine.processes import children

def work(ready):
    ready.send("up")
    time.sleep(60)

if __name__ == "__main__":
    number = int(sys.argv[1])
    port.take("127.0.0.1", number)
    announce_parent()
    children.copy_instead_of_spawn()
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.Process(target=work, args=(writer,), daemon=True)
    child.start()
    assert reader.recv() == "up"
    port.release()
    port.take("127.0.0.1", number)
    print("taken again", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def nothing_is_taken() -> Iterator[None]:
    port.release()
    yield
    port.release()


def test_a_second_start_is_refused_before_it_loads_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        model = write(tmp_path / "model", QWEN3_NEXT)
        assert launch_server.main(["--model-path", str(model), "--port", str(number)]) == 2
        said = capsys.readouterr().err
        assert said == f"error: another server is starting on {HOST}; stop it or pass another --port: {number}\n"
        port.take("127.0.0.2", number)
        other.kill()
    port.take(HOST, number)


def test_a_copy_of_the_process_does_not_keep_it(tmp_path: Path) -> None:
    main = tmp_path / "launcher.py"
    main.write_text(COPY)
    command = [sys.executable, str(main), str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "taken again\n", done.stderr


def test_it_is_given_back_once_the_port_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that drains has closed its port, and another one may start on it."""
    import uvicorn

    number, bound = free_port(), []

    async def startup(_: Any, sockets: Any = None) -> None:
        bound.append([len(port._taken), sockets])

    monkeypatch.setattr(uvicorn.Server, "startup", startup)
    launch_server._before_the_port_is_bound()
    port.take(HOST, number)
    asyncio.run(uvicorn.Server.startup(SimpleNamespace(config=SimpleNamespace(host=HOST, port=number))))
    assert bound == [[1, None]]
    assert port._taken == []


def test_a_port_that_a_program_listens_on() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        number = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"stop the other server or pass another --port: {number}"):
            port.take(HOST, number)
    port.take(HOST, number)
    port.take(HOST, number)  # by the same process: abbreviated flags are read later
