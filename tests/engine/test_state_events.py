"""Events of states from a real server: an index over them says where the next prompt resumes, evictions included."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from sglang_hybrid.cluster.channel import Channel, Follower
from sglang_hybrid.core.process import free_port
from sglang_hybrid.routing.index import STATE_KIND, RestartIndex
from tests.engine.prompts import words
from tests.engine.support import PATIENCE_S, Client

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAGE = 64
SMALL = (
    "--max-mamba-cache-size",
    "24",
    "--max-total-tokens",
    "6144",
    "--page-size",
    str(PAGE),
    "--max-running-requests",
    "2",
)


@contextmanager
def told(client: Client) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The events that came since the last call, as soon as the server is quiet."""
    import zmq

    where = json.loads(client.get("/server_info"))["kv_events"]
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.connect(f"tcp://127.0.0.1:{where['endpoint_port_base']}")
    socket.setsockopt(zmq.SUBSCRIBE, b"")

    def since() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while socket.poll(400):
            found += msgspec.msgpack.decode(socket.recv_multipart()[-1])[1]
        return found

    try:
        yield since
    finally:
        context.destroy(linger=0)


async def joined(client: Client, prompt: list[int], known: RestartIndex) -> RestartIndex:
    """What a reader knows that joins now, once it knows of `prompt` what `known` does."""
    channel = Channel.of(json.loads(client.get("/server_info")), client.server.url)
    assert channel is not None
    index = RestartIndex(channel.page_tokens)
    index.join("a")
    follower = Follower("a", channel, index)
    follower.start()
    for _ in range(int(PATIENCE_S / 0.1)):
        if index.reaches(prompt)["a"] == known.reaches(prompt)["a"]:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)  # the rest of it
    assert follower.shown()["snapshots"] == 1
    follower.stop()
    return index


@pytest.mark.parametrize("policy", ["forecast", "lru"])
def test_what_is_foretold_is_what_is_served(serve: Callable[..., Client], policy: str) -> None:
    replay = f"tcp://127.0.0.1:{free_port()}"
    channel = json.dumps(
        {"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}", "topic": "kv", "replay_endpoint": replay}
    )
    client = serve(
        "gdn", *SMALL, "--hybrid-policy", policy, "--hybrid-state-events", "published", "--kv-events-config", channel
    )
    rng, index = random.Random(7), RestartIndex(PAGE)
    documents, chats = [words(rng, 400) for _ in range(8)], [[]]
    with told(client) as since:
        deadline = time.monotonic() + PATIENCE_S
        while not index.workers and time.monotonic() < deadline:  # a subscription takes its time
            client.generate(words(rng, 100), 2)
            for event in since():
                index.apply("a", event)
        client.flush()
        served = kinds = 0
        for _ in range(70):
            for event in since():
                assert index.apply("a", event), event
                kinds += event.get("kv_cache_spec_kind") == STATE_KIND
            chat = rng.choice(chats[-4:]) if rng.random() < 0.4 else list(rng.choice(documents))
            prompt = chat + words(rng, rng.randrange(20, 120))
            foretold = index.reaches(prompt)["a"].resume_tokens
            answer, cached = client.generate(prompt, 4)
            assert cached == foretold
            served += cached
            chats.append(prompt + answer if len(prompt) < 900 else [])
        for event in since():
            index.apply("a", event)
        late = asyncio.run(joined(client, prompt, index))
        for known in (prompt, *documents, *chats):
            assert late.reaches(known)["a"] == index.reaches(known)["a"], "of a reader that came late"
        client.flush()
        for event in since():
            index.apply("a", event)
        assert index.reaches(prompt)["a"] == (0, 0)
    assert served > 5000
    assert kinds > 60


def test_composed_prompts_are_told_under_keys_of_their_own(serve: Callable[..., Client]) -> None:
    """Their ids fit the events, and what is foretold of plain text is served as before."""
    channel = json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}", "topic": "kv"})
    client = serve(
        "reader-gdn", *SMALL, "--hybrid-segments", "on", "--hybrid-segment-memory-gb", "0.1",
        "--hybrid-state-events", "published", "--kv-events-config", channel,
    )  # fmt: skip
    rng, index, codes = random.Random(8), RestartIndex(PAGE), 0
    documents = [words(rng, 200) for _ in range(4)]
    reused = plain = 0
    with told(client) as since:
        for _ in range(12):
            lead, (one, two) = words(rng, 90), rng.sample(documents, 2)
            prompt = lead + one + two + words(rng, 150)
            segments = [[90, 290], [290, 490]]
            sampling = {"temperature": 0, "max_new_tokens": 4, "custom_params": {"segments": segments}}
            found = client.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
            reused += found["meta_info"]["cached_tokens_details"]["segment_tokens"]
            for event in since():
                assert index.apply("a", event), event
                codes += sum(token >= 2**31 for token in event.get("token_ids", ()))
            exact = lead + words(rng, 60)
            foretold = index.reaches(exact)["a"].resume_tokens if index.workers else 0
            _, cached = client.generate(exact, 2)
            assert cached == foretold
            plain += cached
    assert reused > 2000
    assert plain > 500
    assert codes >= 3 * 2 * 6
