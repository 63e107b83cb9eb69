"""What a request said is known in the threads that work for it."""

import asyncio
from contextvars import ContextVar
from types import SimpleNamespace

from sglang_hybrid.engine.frontend.server import executor

WHO: ContextVar[str] = ContextVar("who", default="nobody")


async def answers(names: list[str]) -> list[str]:
    async def answer(name: str) -> str:
        WHO.set(name)
        return await asyncio.get_running_loop().run_in_executor(None, WHO.get)

    return list(await asyncio.gather(*map(answer, names)))


def test_threads_of_the_loop_work_in_the_context_of_a_request() -> None:
    async def served(*scopes: str) -> list[str]:
        for scope in scopes:
            executor.install(SimpleNamespace(), {"type": scope})
        return await answers(["a", "b", "c"])

    assert asyncio.run(served("http")) == ["nobody"] * 3, "threads have a context of their own"
    assert asyncio.run(served("lifespan", "http")) == ["a", "b", "c"]


def test_an_error_reaches_who_asked() -> None:
    async def served() -> object:
        executor.install(SimpleNamespace(), {"type": "lifespan"})
        try:
            return await asyncio.get_running_loop().run_in_executor(None, int, "x")
        except ValueError as error:
            return error

    assert isinstance(asyncio.run(served()), ValueError)
