"""Who may write a request log: one server, into a file."""

import os
from pathlib import Path

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.replay import replay
from sglang_hybrid.prefix.request_log import RecordedDecisions, RequestLog, check_writable
from tests.unit.prefix.test_decisions import SPEC, drive


def test_two_servers_do_not_write_one_log(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("of the start before")
    log = RequestLog(path, 10_000_000)
    decisions = RecordedDecisions(log, SPEC, "forecast")
    for other in (check_writable, lambda path: RequestLog(path, 10_000_000)):
        with pytest.raises(ConfigError, match=r"another server writes this request log.*requests\.jsonl"):
            other(path)
    drive(decisions, requests=20)
    log.close()
    assert (replay(path).complete, replay(path).differences) == (True, [])
    check_writable(path)
    for nobodys in [RequestLog(Path("/dev/null"), 10_000_000) for _ in range(2)]:
        nobodys.close()


def test_a_pipe_is_no_request_log(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="cannot write the request log"):  # and nobody waits for a reader
        check_writable(path)
