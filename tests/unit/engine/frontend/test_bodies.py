"""Bodies that come compressed: bounded as they come, and once they are plain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zstandard

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.engine.frontend.validation import bodies
from sglang_hybrid.engine.surface.hooks import HOOKS


@pytest.fixture(autouse=True)
def _of_a_kilobyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "settings", lambda: HybridConfig(max_body_mb=0.001))


def answer(messages: list[dict[str, Any]], path: str = "/generate", method: str | None = "zstd") -> tuple[int, bytes]:
    """The status that a client gets, and the body that reaches SGLang's endpoint; `messages` are the server's."""
    from sglang.srt.entrypoints.http_request_decompression import RequestDecompressionMiddleware

    got, said = bytearray(), list[dict[str, Any]]()

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            got.extend(message["body"])
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    headers = [] if method is None else [(b"x-body-compressed", method.encode())]
    scope = {"type": "http", "path": path, "headers": headers, "method": "POST"}
    middleware = RequestDecompressionMiddleware(endpoint)
    asyncio.run(bodies.decompress(RequestDecompressionMiddleware.__call__, middleware, scope, receive, send))
    return said[0]["status"], bytes(got)


def parts(raw: bytes, size: int = 300) -> list[dict[str, Any]]:
    cut = [raw[at : at + size] for at in range(0, len(raw), size)]
    return [{"type": "http.request", "body": part, "more_body": part is not cut[-1]} for part in cut]


BOMB = zstandard.compress(b"x" * 1_000_000)
NOISE = bytes(range(256)) * 8


def test_a_body_that_fits_is_read() -> None:
    plain = b"x" * 900
    assert answer(parts(zstandard.compress(plain))) == (200, plain)
    assert answer(parts(NOISE), method=None) == (200, NOISE), "bounded elsewhere"
    assert answer(parts(BOMB), path="/update_weights_from_tensor") == (200, b"x" * 1_000_000)


def test_a_few_bytes_that_become_many_are_refused() -> None:
    assert len(BOMB) < 1_000
    assert answer(parts(BOMB)) == (413, b"")
    assert answer(parts(BOMB[:-4])) == (413, b""), "before its end is seen"


def test_a_compressed_body_that_is_too_long_is_not_read_to_its_end() -> None:
    messages = parts(NOISE)
    assert answer(messages) == (413, b"")
    assert messages


def test_what_is_wrong_with_others_says_sglang() -> None:
    assert answer(parts(b"no zstd")) == (400, b"")
    assert answer(parts(b"x"), method="gzip") == (400, b"")
    assert answer([{"type": "http.disconnect"}]) == (200, b""), "a client that hung up"


@pytest.mark.parametrize(("asked", "hooked"), [("0", []), ("1", [bodies.COMPRESSED])])
def test_only_servers_that_decompress_are_hooked(
    monkeypatch: pytest.MonkeyPatch, asked: str, hooked: list[str]
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_REQUEST_DECOMPRESSION", asked)
    assert bodies.features() == hooked
    assert [hook.function for hook in HOOKS if hook.when == bodies.COMPRESSED] == [
        "frontend.validation.bodies:decompress"
    ]
