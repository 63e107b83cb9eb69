"""The flags that a cluster gives its servers."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.cluster import local, route
from sglang_hybrid.cluster.local import _Kept
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.launch import platform


def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *flags: str, servers: int = 3) -> list[_Kept]:
    """The servers of `sglang-hybrid cluster`, none of which is started."""
    found: list[_Kept] = []

    async def run(_: argparse.Namespace, kept: list[_Kept]) -> int:
        found.extend(kept)
        return 0

    def now(coroutine: Any) -> int:
        return asyncio.run(coroutine)

    monkeypatch.setattr(local, "_run", run)
    monkeypatch.setattr(route, "run", now)
    argv = [
        "--servers",
        str(servers),
        "--model-path",
        "m",
        "--logs",
        str(tmp_path / "logs"),
        "--",
        "--device",
        "cpu",
        *flags,
    ]
    assert local.main(argv) == 0
    return found


@pytest.mark.parametrize(
    ("flags", "each"),
    [
        ("", 1),
        ("--tp 2", 2),
        ("--tp-size=2 --pp-size 2", 4),
        ("--dp-size 3", 3),
        ("--tp 2 --dp 2 --enable-dp-attention", 2),
    ],
)
def test_every_server_has_the_gpus_of_all_its_ranks(monkeypatch: pytest.MonkeyPatch, flags: str, each: int) -> None:
    monkeypatch.setattr(platform, "wants_cpu", lambda _: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(2 * each))))
    shares = [share["CUDA_VISIBLE_DEVICES"].split(",") for share in local._gpus(2, flags.split())]
    assert shares == [[str(gpu) for gpu in range(at * each, (at + 1) * each)] for at in range(2)]
    with pytest.raises(ConfigError, match=f"3 servers of {each} GPUs each need {3 * each}; there are: {2 * each}"):
        local._gpus(3, flags.split())


@pytest.mark.parametrize("flags", [("--hybrid-segments", "on"), ("--hybrid-segments=on",)])
def test_servers_with_segments_compute_them_for_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    servers = started(monkeypatch, tmp_path, *flags)
    peers = ",".join(server.url for server in servers)
    assert all(server.flags[-2:] == ["--hybrid-segment-peers", peers] for server in servers)
    assert len({server.url for server in servers}) == 3


class Ended:
    """A server that ends at once."""

    process = SimpleNamespace(poll=lambda: 1, returncode=1)

    def stop(self) -> None: ...

    def log_tail(self, _: int) -> str:
        return ""


def kept(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: type[Ended]) -> Any:
    """A server of a cluster, behind all its starts, each of which is of `kind`; nobody waits between them."""

    async def at_once(_: float) -> None: ...

    server = started(monkeypatch, folder, servers=1)[0]
    monkeypatch.setattr(local, "Server", kind)
    monkeypatch.setattr(asyncio, "sleep", at_once)
    asyncio.run(server.keep())
    return server


def test_a_server_whose_log_was_removed_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts: list[Path] = []

    class Dead(Ended):
        """One whose logs somebody removes, with their folder."""

        def __init__(self, *_: Any, log: Path, **__: Any) -> None:
            starts.append(log)
            log.parent.rmdir()

    server = kept(monkeypatch, tmp_path, Dead)
    assert starts == [server.log] * local.GIVE_UP


def test_a_server_is_started_again_on_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error here ended all other servers too, and the cluster, without a word."""
    starts: list[Path] = []

    class Dead(Ended):
        def __init__(self, *_: Any, log: Path, **__: Any) -> None:
            starts.append(log)
            if log != Path(os.devnull) or len(starts) > 4:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    server = kept(monkeypatch, tmp_path, Dead)
    assert starts == [server.log, Path(os.devnull)] * local.GIVE_UP
    assert "starts without a log: [Errno 28]" in caplog.text
    assert "cannot be started: [Errno 28]" in caplog.text


def test_others_and_one_alone_do_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = ("--hybrid-segments", "on", "--hybrid-segment-peers", "http://a:1")
    for flags, count in (((), 2), (("--hybrid-segments", "off"), 2), (("--hybrid-segments", "on"), 1), (own, 2)):
        for server in started(monkeypatch, tmp_path, *flags, servers=count):
            assert server.flags.count("--hybrid-segment-peers") == flags.count("--hybrid-segment-peers")
