"""What SGLang's own router leaves of a request, beside ours: why there is one of ours (docs/cluster.md)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from typing import Any

import pytest

from sglang_hybrid.core.process import free_port
from tests.unit.cluster.fake import FakeWorker, cluster

PYTHON = os.environ.get("SGLANG_ROUTER_PYTHON")
START = """
import sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
Router.from_args(RouterArgs(worker_urls=[sys.argv[2]], host="127.0.0.1", port=int(sys.argv[1]), policy="round_robin",
                            prometheus_port=int(sys.argv[3]))).start()
"""
WORDS = ("cache_control", "cache_hints", "cache_salt", "custom_params", "input_ids")
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}],
    "cache_hints": {"final": True},
    "cache_salt": "tenant",
    "custom_params": {"cache_boundaries": [64]},
    "input_ids": [1, 2, 3],
}


@pytest.mark.skipif(PYTHON is None, reason="SGLANG_ROUTER_PYTHON names no interpreter with sglang-router")
def test_words_of_clients_get_lost_in_sglangs_router_and_not_in_ours() -> None:
    async def run() -> None:
        one = FakeWorker()
        async with cluster(one) as (url, client, _):
            async with client.post(url + "/v1/chat/completions", json=BODY) as answer:
                assert answer.status == 200
            assert json.loads(one.requests[-1][2]) == BODY
            port = free_port()
            router = subprocess.Popen([str(PYTHON), "-c", START, str(port), one.url, str(free_port())])
            try:
                for _ in range(300):
                    await asyncio.sleep(0.1)
                    try:
                        async with client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=BODY) as answer:
                            if answer.status == 200:
                                break
                    except OSError:
                        continue
                arrived = one.requests[-1][2].decode()
                assert "messages" in arrived
                assert not [word for word in WORDS if word in arrived]
                async with client.post(f"http://127.0.0.1:{port}/v1/messages", json=BODY) as answer:
                    assert answer.status == 404
            finally:
                router.kill()
                router.wait()

    asyncio.run(run())
