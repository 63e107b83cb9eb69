"""Start, watch and stop a server process: used by the quickstart, the tests and the benchmarks."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from sglang_hybrid.core.process import die_with_parent, free_port

LAUNCHER = "sglang_hybrid.launch_server"


class ServerDied(RuntimeError):
    """The server process ended before it was ready; the message carries the end of its log."""


class Server:
    """One server process and all its children, in a process group of their own.

    A context manager: leaving it stops the server, and so does the death of this process, however it dies. With
    `outlive` the server keeps running in both cases.
    """

    health = "/health_generate"

    def __init__(
        self,
        model: Path | str,
        flags: Sequence[str] = (),
        *,
        port: int | None = None,
        log: Path,
        environment: Mapping[str, str] | None = None,
        launcher: str = LAUNCHER,
        outlive: bool = False,
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._outlive = outlive
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                self.command(launcher, str(model), flags),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if outlive else partial(die_with_parent, signal.SIGTERM),
                env={**os.environ, **(environment or {})},
            )

    def command(self, launcher: str, model: str, flags: Sequence[str]) -> list[str]:
        """What is executed; the server of another engine overrides it, and `health`."""
        return [sys.executable, "-m", launcher, "--model-path", model, "--port", str(self.port), *flags]

    def wait_ready(self, timeout_seconds: float = 900, progress: Callable[[float, str], None] | None = None) -> float:
        """Block until the server answers a real generation; returns the seconds it took.

        `progress(seconds, last_log_line)` is called about once a second. Raises ServerDied, or TimeoutError after
        stopping the server.
        """
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < timeout_seconds:
            if self.process.poll() is not None:
                raise ServerDied(f"the server ended with status {self.process.returncode}:\n{self.log_tail()}")
            if self.answers():
                return time.monotonic() - start
            if progress is not None:
                progress(elapsed, self.log_tail(1))
            time.sleep(0.5)
        self.stop()
        raise TimeoutError(f"the server was not ready after {timeout_seconds:.0f} s:\n{self.log_tail()}")

    def log_tail(self, lines: int = 25) -> str:
        """The last non-empty lines the server wrote."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])

    def stop(self, timeout_seconds: float = 20) -> int:
        """Ask the server to end, then insist; returns its exit status. No process of its group is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def answers(self) -> bool:
        """Whether the server answers a real generation."""
        try:
            with urllib.request.urlopen(self.url + self.health, timeout=30) as response:
                return bool(response.status == 200)
        except (http.client.HTTPException, urllib.error.URLError, OSError):
            return False

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._outlive or kind is not None:
            self.stop()
