"""Following a worker's events: addresses, and what is heard when a socket cannot be had at once."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from sglang_hybrid.cluster import channel as channel_module
from sglang_hybrid.cluster.channel import Channel, Follower
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.routing.index import RestartIndex

TOLD: dict[str, Any] = {
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv",
    "block_size": 64,
    "dp_size": 1,
}


@pytest.mark.parametrize(
    ("told", "config", "expected"),
    [
        ({}, None, Channel("tcp://10.0.0.7:5557", None, "kv", 64)),
        ({}, {"replay_endpoint": "tcp://*:5558"}, Channel("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558", "kv", 64)),
        ({"endpoint_host": "127.0.0.1"}, None, Channel("tcp://127.0.0.1:5557", None, "kv", 64, binds=True)),
        ({"topic": None}, {"replay_endpoint": "ipc:///nowhere"}, Channel("tcp://10.0.0.7:5557", None, "", 64)),
        ({"endpoint_port_base": None}, None, None),
    ],
)
def test_where_a_worker_tells(told: dict[str, Any], config: Any, expected: Channel | None) -> None:
    info = {"kv_events": {**TOLD, **told}, "kv_events_config": None if config is None else json.dumps(config)}
    assert Channel.of(info, "http://10.0.0.7:30000") == expected


@pytest.mark.parametrize(("field", "value"), [("dp_size", 2), ("block_size", 0)])
def test_a_channel_that_cannot_be_followed(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=str(value)):
        Channel.of({"kv_events": {**TOLD, field: value}}, "http://10.0.0.7:30000")
    assert Channel.of({"kv_events": "garbage"}, "http://10.0.0.7:30000") is None


def test_an_address_that_is_taken_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "RETRY_S", 0.05)
    monkeypatch.setattr(channel_module, "JOINED_S", 0.0)

    async def run() -> None:
        import msgspec
        import zmq
        import zmq.asyncio

        taken = socket.socket()
        taken.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        index = RestartIndex(4)
        follower = Follower("a", Channel(endpoint, None, "", 4, binds=True), index)
        follower.start()
        await asyncio.sleep(0.2)
        taken.close()
        with zmq.asyncio.Context() as context:
            publisher = context.socket(zmq.PUB)
            publisher.connect(endpoint)
            for number in range(2_000):
                batch = [0.0, [{"type": "BlockStored", "block_hashes": [number]}], 0]
                await publisher.send_multipart([b"", number.to_bytes(8, "big"), msgspec.msgpack.encode(batch)])
                await asyncio.sleep(0.01)
                if follower.events:
                    break
            publisher.close(linger=0)
        assert follower.events
        follower.stop()

    asyncio.run(run())
