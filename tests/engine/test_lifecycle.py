"""A server's life: models without recurrent layers, two servers at once, a killed scheduler, Ctrl-C, the quickstart."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sglang_hybrid.demo.server import Server, ServerDied
from tests.engine.support import PATIENCE_S, Client, Reference, eventually

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HALF_BORN = re.compile(
    r"Traceback \(most recent call last\):\n(?:  .*\n)*?.*multiprocessing/spawn\.py.*\n(?:  .*\n)*"
    r"(?:EOFError: Ran out of input|_pickle\.UnpicklingError: pickle data was truncated)\n"
)
"""What Python prints for a child whose parent ended while it told the child what to do."""


def children(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def survivors(processes: list[psutil.Process]) -> list[str]:
    """Names of the processes that do not end; an empty list is what every test wants."""
    psutil.wait_procs(processes, timeout=PATIENCE_S)
    alive = [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    return [process.name() for process in alive]


def test_a_model_without_recurrent_layers_is_served(
    serve: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    client, reference = serve("attention"), references("attention")
    prompt = list(range(3, 203))
    output, cold = client.generate(prompt)
    again, warm = client.generate(prompt)
    reference.assert_greedy(prompt, output)
    reference.assert_same(prompt, output, again)
    assert (cold, warm) == (0, 199)
    text = client.server.log.read_text()
    assert "note: the model has no recurrent layers" in text
    assert "a prefix is reused to the page of 1 tokens" in text


def test_the_start_block_is_true(serve: Callable[..., Client]) -> None:
    text = serve("gdn", "--chunked-prefill-size", "128").server.log.read_text()
    assert "sglang-hybrid is active:" in text
    assert "3 gdn" in text
    assert "KV           262,144 tokens x 512 B = 128.0 MiB" in text  # 1 attention layer, 2 heads x 32, K and V, fp32
    assert "checkpoint grid of 64 tokens" in text
    source = "from chunks of the delta-rule kernel, as float32, and our kernel inside a chunk"
    assert f"prefill      a state at any token, {source}" in text
    assert "16 requests at once, limited by --max-running-requests" in text
    assert "the cost model expected" not in text


def test_children_share_what_the_first_process_imported(serve: Callable[..., Client]) -> None:
    server = serve("gdn", "--chunked-prefill-size", "128").server
    (detokenizer,) = (process for process in children(server) if "detokenizer" in process.name())
    rollup = Path(f"/proc/{detokenizer.pid}/smaps_rollup").read_text()
    shared = re.search(r"^Shared_Dirty: +(\d+) kB$", rollup, re.MULTILINE)
    assert shared is not None
    assert int(shared[1]) > 100_000, "memory of a copy that nobody wrote to; a spawned child has none"


def test_two_servers_then_one_loses_its_scheduler(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Killing one server's scheduler ends that server, says why, leaves nothing behind, and the other serves on.

    Ctrl-C then ends that one cleanly.
    """
    folder = models("gdn")
    with (
        Server(folder, log=tmp_path / "one.log") as one,
        Server(folder, log=tmp_path / "other.log") as other,
    ):
        one.wait_ready(PATIENCE_S)
        other.wait_ready(PATIENCE_S)
        family = children(one)
        files = files_of([*family, psutil.Process(one.process.pid)])
        scheduler = next(process for process in family if "scheduler" in process.name())
        scheduler.kill()
        assert one.process.wait(PATIENCE_S) == 1, "SIGKILL would look like the kernel's out-of-memory killer"
        assert survivors(family) == []
        assert [file for file in files if Path(file).exists()] == []
        assert "The operating system killed scheduler_0, most often for memory: lower" in one.log.read_text()
        assert len(Client(other).generate(list(range(3, 90)))[0]) == 8
        assert_ends_cleanly(other, signal.SIGINT)


def files_of(family: list[psutil.Process]) -> set[str]:
    """The Unix sockets and the pieces of shared memory that these processes have."""
    sockets = {link.laddr for each in family for link in each.net_connections("unix") if link.laddr.startswith("/")}
    shared = {file.path for each in family for file in each.open_files() if file.path.startswith("/dev/shm/")}
    assert any("sglang_loads" in path for path in shared)
    return sockets | shared


def assert_ends_cleanly(server: Server, number: signal.Signals) -> None:
    family = children(server)
    server.process.send_signal(number)
    server.process.wait(PATIENCE_S)
    assert survivors(family) == []
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_to_the_group_ends_the_server_cleanly(
    models: Callable[[str], Path], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """As systemd, `timeout` and a terminal send it: every process gets the signal at once."""
    with Server(models("gdn"), log=tmp_path / "server.log") as server:
        server.wait_ready(PATIENCE_S)
        family = children(server)
        files = files_of([*family, psutil.Process(server.process.pid)])
        assert len(files) > 2, "sockets, and shared memory for the loads"
        os.killpg(server.process.pid, number)
        assert server.process.wait(PATIENCE_S) == status
        assert survivors(family) == []
        assert [file for file in files if Path(file).exists()] == []
        said = server.log.read_text()
    assert "Traceback" not in said
    assert "crashed" not in said
    assert "died" not in said


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_server_told_to_stop_in_a_pause_answers_first(
    models: Callable[[str], Path], tmp_path: Path, mode: str
) -> None:
    sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [5] * 40, "sampling_params": sampling, "stream": True}
    with Server(models("gdn"), log=tmp_path / "server.log") as server:
        server.wait_ready(PATIENCE_S)
        client, family = Client(server), children(server)
        with client.open("/generate", json.dumps(body).encode(), PATIENCE_S) as answer:
            assert b"data: {" in answer.readline(), "it has begun to answer"
            client.post("/pause_generation", {"mode": mode})
            server.process.terminate()
            chunks = answer.read().decode().split("\n\n")
        assert chunks[-2] == "data: [DONE]"
        assert json.loads(chunks[-3].removeprefix("data: "))["meta_info"]["completion_tokens"] == 200
        assert server.process.wait(PATIENCE_S) == 0
        assert survivors(family) == []


@pytest.mark.parametrize(
    ("number", "send", "status"),
    [
        (signal.SIGTERM, os.kill, -signal.SIGTERM),
        (signal.SIGKILL, os.kill, -signal.SIGKILL),
        (signal.SIGTERM, os.killpg, -signal.SIGTERM),
        (signal.SIGINT, os.killpg, 130),
    ],
)
def test_a_signal_during_start_up_leaves_nothing(
    models: Callable[[str], Path],
    tmp_path: Path,
    number: signal.Signals,
    send: Callable[[int, int], None],
    status: int,
) -> None:
    """The children are still importing: SGLang has not bound them to their parent yet."""
    with Server(models("gdn"), log=tmp_path / "server.log") as server:
        assert eventually(lambda: len(children(server)) >= 3, every_s=0.05)
        family = children(server)
        send(server.process.pid, number)
        assert server.process.wait(PATIENCE_S) == status
        assert survivors(family) == []
        assert "Traceback" not in HALF_BORN.sub("", server.log.read_text())


def test_ctrl_c_during_the_imports(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Before any child, anywhere in ten seconds of imports."""
    with Server(models("gdn"), log=tmp_path / "server.log") as server:
        process = psutil.Process(server.process.pid)
        assert eventually(lambda: any("torch" in file.path for file in process.memory_maps()), every_s=0.05)
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(PATIENCE_S) == 130
        assert "Traceback" not in server.log.read_text()


def test_a_start_that_fails_says_so(models: Callable[[str], Path], tmp_path: Path) -> None:
    flags = ["--max-mamba-cache-size", "2"]
    with (
        Server(models("gdn"), flags, log=tmp_path / "server.log") as server,
        pytest.raises(ServerDied, match=r"(?s)ended with status 2:.*no room for one request"),
    ):
        server.wait_ready(PATIENCE_S)


def test_a_port_taken_while_the_model_loads(models: Callable[[str], Path], tmp_path: Path) -> None:
    with Server(models("gdn"), log=tmp_path / "server.log") as server, socket.socket() as thief:
        assert eventually(lambda: len(children(server)) >= 3, every_s=0.05)
        family = children(server)
        thief.bind(("127.0.0.1", server.port))
        thief.listen()
        assert server.process.wait(PATIENCE_S) == 2
        assert survivors(family) == []
        assert f"pass another --port: {server.port}" in server.log_tail(1)


def test_the_quickstart(tmp_path: Path) -> None:
    """The README's first command, after its set-up step: right answers, a row per request, every later turn cached."""
    table = tmp_path / "table.json"
    command = [sys.executable, "-m", "sglang_hybrid.demo.quickstart", "--once", "--port", "0", "--json", str(table)]
    mark = f"quickstart in {tmp_path}"
    environment = {**os.environ, "COLUMNS": "120", "SGLANG_HYBRID_TEST": mark}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(table.read_text())
    assert result["ok"] is True
    assert [row["turn"] for row in result["requests"]] == [1, 1, 2, 2, 3, 3]
    for row in result["requests"]:
        assert row["right"] is True, row
        assert row["cached_tokens"] + row["new_tokens"] + row["behind_tokens"] == row["prompt_tokens"]
    # The second conversation opens with the documents of the first, whose end was checkpointed.
    assert [row["cached_tokens"] > 0 for row in result["requests"]] == [False, *[True] * 5]
    left = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("SGLANG_HYBRID_TEST") == mark]
    assert left == []
