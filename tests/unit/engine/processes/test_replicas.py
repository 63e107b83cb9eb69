"""Servers of several schedulers: which are refused, what each takes, and one that dies."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.doctor import status
from sglang_hybrid.engine.launch import early
from sglang_hybrid.engine.processes import replicas
from sglang_hybrid.engine.surface import registration


def sizes(replicas: int = 1, stages: int = 1, enable_dp_attention: bool = False) -> SimpleNamespace:
    return SimpleNamespace(dp_size=replicas, pp_size=stages, enable_dp_attention=enable_dp_attention)


def test_every_replica_takes_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "memory_bytes", lambda: 10**10)
    early.check_memory(HybridConfig(cpu_memory_gb=3), sizes(3))
    with pytest.raises(ConfigError, match=r"\(10\.0 GB, of which.*: 11$"):
        early.check_memory(HybridConfig(cpu_memory_gb=11), sizes())
    with pytest.raises(ConfigError, match="gb: 3 for each of --dp-size 4"):
        early.check_memory(HybridConfig(cpu_memory_gb=3), sizes(4))
    early.check_memory(HybridConfig(cpu_memory_gb=3), sizes(4, enable_dp_attention=True))


CONTROLLER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
"""


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process that started another and never looks at it, as SGLang's; and the pid of the other."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    titles = {process.pid: "sglang::data_parallel_controller", child: "sglang::scheduler_DP1"}
    monkeypatch.setattr(replicas, "_title", lambda each: titles.get(each.pid, "another"))
    yield process, child
    process.kill()
    process.communicate()
    if psutil.pid_exists(child):
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSEGV])
def test_a_replica_that_dies_is_seen(controller: Any, by: signal.Signals) -> None:
    process, child = controller
    watchdog = SimpleNamespace(_processes=[process], _names=["scheduler_0"])
    for _ in range(2):
        replicas.watch(watchdog)
    assert watchdog._names == ["scheduler_0", "scheduler_DP1"]
    replica = watchdog._processes[1]
    assert (replica.pid, replica.is_alive()) == (child, True)
    os.kill(child, by)
    until = time.monotonic() + 60
    while replica.is_alive() and time.monotonic() < until:
        time.sleep(0.05)
    assert (replica.is_alive(), replica.exitcode) == (False, -by)


def test_other_processes_have_no_replicas() -> None:
    watchdog = SimpleNamespace(
        _processes=[SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=2**22 + 5)], _names=["a", "b"]
    )
    replicas.watch(watchdog)
    assert watchdog._names == ["a", "b"]
    assert replicas.Replica(SimpleNamespace(pid=2**22 + 5), "gone").exitcode == 0


LOADING = """
import multiprocessing, os, signal, sys, time
from types import SimpleNamespace
from sglang_hybrid.engine.processes import replicas

def launch(controller):
    reader, writer = multiprocessing.Pipe(duplex=False)
    scheduler = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    scheduler.start()
    controller.scheduler_procs += [None, scheduler]
    if sys.argv[1] == "0":
        writer.send("ready")
    else:
        os.kill(scheduler.pid, int(sys.argv[1]))
    reader.recv()  # as SGLang: of one that is gone it hears nothing, for it keeps the other end open
    return scheduler

replicas._LOOK_S = 0.01
served = replicas.wait_for_the_living(launch, SimpleNamespace(scheduler_procs=[]))
served.kill()
served.join()
time.sleep(0.1)
"""


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGBUS, 0])
def test_a_replica_that_dies_while_weights_are_loaded_is_not_waited_for(by: int) -> None:
    """Its controller ends as it did, and the first process tells why; once all serve, it looks no more."""
    done = subprocess.run([sys.executable, "-c", LOADING, str(int(by))], capture_output=True, text=True, timeout=600)
    assert done.returncode == -by, done.stderr
    assert (f"ended with status {-by} before it served" in done.stderr) == bool(by)


def test_a_controller_that_is_spawned_has_our_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang loads plugins in every process of a server but this one: requests were handed round as in stock."""
    from sglang.srt import plugins
    from sglang.srt.entrypoints import engine
    from sglang.srt.managers import data_parallel_controller

    name, done = "run_data_parallel_controller_process", list[object]()
    monkeypatch.setattr(plugins, "load_plugins", lambda: done.append("plugins"))
    monkeypatch.setattr(data_parallel_controller, name, lambda *args, **kwargs: done.append((args, kwargs)))
    monkeypatch.setattr(engine, name, None)
    registration.replace("replicas")
    pickle.loads(pickle.dumps(getattr(engine, name)))("arguments", port=1)
    assert done == ["plugins", (("arguments",), {"port": 1})]


def test_pools_are_told_by_replica() -> None:
    page = "".join(
        f'sglang:kv_{kind}_tokens{{dp_rank="{rank}",tp_rank="0"}} {value}.0\n'
        for rank, values in ((0, (5, 10, 85)), (1, (0, 90, 10)))
        for kind, value in zip(("used", "evictable", "available"), values, strict=True)
    )
    found = {each.subject: each.value for each in status.describe(page)}
    assert found["KV of replica 0"].startswith("100: 5 in use by requests, 10 cached, 85 free")
    assert found["KV of replica 1"].startswith("100: 0 in use by requests, 90 cached, 10 free")
    assert "KV" in {each.subject for each in status.describe(page.split('sglang:kv_used_tokens{dp_rank="1"')[0])}
