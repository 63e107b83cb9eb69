"""Of a server with several replicas a flush has succeeded if all of them flushed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_hybrid.engine.frontend.admin.flushes import all_of_them


@pytest.mark.parametrize("flushed", [(True, False), (False, True), (True, True)])
def test_one_replica_that_could_not_flush_is_the_answer(flushed: tuple[bool, ...]) -> None:
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.communicator import FanOutCommunicator

    async def ask() -> list[Any]:
        communicator = FanOutCommunicator[Any](lambda _: None, len(flushed))
        asked = asyncio.ensure_future(
            all_of_them(FanOutCommunicator.__call__, communicator, io_struct.FlushCacheReqInput())
        )
        await asyncio.sleep(0)
        for success in flushed:
            communicator.handle_recv(io_struct.FlushCacheReqOutput(success=success))
        return list(await asked)

    answers = asyncio.run(ask())
    assert [answer.success for answer in answers] == sorted(flushed)


def test_answers_to_anything_else_keep_their_order() -> None:
    from sglang.srt.managers import io_struct

    async def told(_communicator: Any, _message: Any) -> list[str]:
        return ["b", "a"]

    assert asyncio.run(all_of_them(told, None, io_struct.GetInternalStateReq())) == ["b", "a"]
