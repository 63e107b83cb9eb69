"""Workers of a router: which of them are well, looked at again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiohttp

from sglang_hybrid.cluster.channel import Channel, Follower
from sglang_hybrid.cluster.failures import reason, router_is_short
from sglang_hybrid.cluster.worker import Worker, checked, most_running
from sglang_hybrid.routing.index import RestartIndex
from sglang_hybrid.routing.looks import ALIVE, ENDING, INFO, SERVER

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at a worker's health."""

PATIENCE_S = 5.0
"""For an answer to such a look. A slow worker is not gone: it is left after `MISSED` of them in a row."""

READY = "/health"
READY_S = 25.0
"""For the first answer of a worker: SGLang gives the token twenty seconds."""

MISSED = 3


class Workers:
    """All workers of a router, and the index of what they hold.

    They have one model and one page size, those of the first that answers; another one is left out, and says why.
    """

    def __init__(
        self,
        urls: list[str],
        session: aiohttp.ClientSession,
        api_key: str | None = None,
        fits: Callable[[Worker, dict[str, Any], list[Worker]], None] | None = None,
    ) -> None:
        """`fits` is asked of a worker, its `/server_info` and the healthy others, and raises ValueError if not."""
        self.all = {url: Worker(url) for url in checked(urls)}
        self._fits = fits
        self.index: RestartIndex | None = None
        self._model: str | None = None
        self._fingerprint = ""
        self._session = session
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def healthy(self) -> list[Worker]:
        return [worker for worker in self.all.values() if worker.healthy]

    @property
    def _there(self) -> list[Worker]:
        """Those with which a worker that comes has to agree."""
        return [worker for worker in self.all.values() if worker.there and not worker.ending]

    async def start(self) -> None:
        """Look at every worker once, then again and again in the background."""
        looks = {worker.url: asyncio.create_task(self._look(worker)) for worker in self.all.values()}
        self._tasks = [asyncio.create_task(self._watch(self.all[url], look)) for url, look in looks.items()]
        await asyncio.gather(*looks.values())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.all.values():
            self._forget(worker)

    def doubt(self, worker: Worker, why: str) -> None:
        """A connection of `worker` broke off: it gets no request before a look, at once, has shown that it lives.

        The requests that it has go on: SGLang breaks off one answer alone when that one raises an error.
        """
        if worker.healthy:  # else it is out, or looked at already: one look is enough for all connections
            logger.warning("worker %s is looked at: %s", worker, why)
            worker.healthy, worker.why = False, why
            worker.doubted.set()

    def failed(self, worker: Worker, why: str) -> None:
        """`worker` is gone: it gets no request before it has answered again, and those it has end with TimeoutError."""
        if worker.healthy or why != worker.why:
            logger.warning("worker %s is %s: %s", worker, "out" if worker.model else "awaited", why)
        worker.healthy, worker.ending, worker.why = False, False, why
        worker.doubted.clear()
        now = asyncio.get_running_loop().time()
        deadlines, worker.deadlines = worker.deadlines, set()
        for deadline in deadlines:
            if not deadline.expired():  # one that is just ending its request must not be set again
                deadline.reschedule(now)
        self._forget(worker)

    async def _watch(self, worker: Worker, first: asyncio.Task[None]) -> None:
        """Look again and again, behind the `first` look, and at once where `worker` is doubted."""
        await asyncio.wait({first})
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await worker.doubted.wait()
            try:
                await self._look(worker)
            except Exception:  # a bug here must not end the health of a worker for ever
                logger.exception("looking at worker %s", worker)
                await asyncio.sleep(LOOK_S)

    async def _look(self, worker: Worker) -> None:
        try:
            if worker.there:
                await self._look_again(worker)
                return
            async with self._get(worker, READY, READY_S) as answer:
                if answer.status != 200:
                    raise OSError(f"{READY} answers {answer.status}")
            await self._meet(worker)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if router_is_short(error) and worker.there:
                await asyncio.sleep(LOOK_S)
                return
            worker.missed += 1
            slow = isinstance(error, TimeoutError) and worker.missed < MISSED
            if slow and worker.there:
                return
            self.failed(worker, reason(error))

    async def _look_again(self, worker: Worker) -> None:
        doubted = worker.doubted.is_set()
        async with self._get(worker, ALIVE) as answer:
            if answer.status >= 500:  # of a proxy, whose server is gone
                raise OSError(f"{ALIVE} answers {answer.status}")
            server, ending = answer.headers.get(SERVER, ""), ENDING in answer.headers
        worker.missed = 0
        if not worker.there:
            return  # it was found to be gone meanwhile
        if server != worker.server:
            logger.warning("worker %s is another server than before", worker)
            await self._meet(worker)
        elif ending:
            self._ends(worker)
        elif doubted:
            worker.healthy, worker.why = True, ""
            worker.doubted.clear()
            logger.info("worker %s lives, and is in again", worker)

    def _ends(self, worker: Worker) -> None:
        """`worker` was told to stop, and would not end as long as it gets requests; those that it has go on."""
        if not worker.ending:
            logger.info("worker %s is told to stop, and gets no new requests", worker)
        worker.healthy, worker.ending, worker.why = False, True, "it is told to stop"
        worker.doubted.clear()

    async def _meet(self, worker: Worker) -> None:
        """`worker` is there, or there again: what it is decides whether it is one of these."""
        async with self._get(worker, INFO) as answer:
            if answer.status != 200:
                raise OSError(f"/server_info answers {answer.status}; has the router the workers' --api-key?")
            server, info = answer.headers.get(SERVER, ""), await answer.json(content_type=None)
        if not isinstance(info, dict):
            raise ValueError("/server_info is no object: is it an SGLang server?")
        channel = self._agreed(worker, server, info)
        worker.page_tokens, worker.server = 0 if channel is None else channel.page_tokens, server
        worker.model = _model(info)
        worker.context_tokens = int(info.get("max_req_input_len") or info.get("context_length") or 0)
        worker.most_running = most_running(info)
        self._forget(worker)
        if channel is not None and self.index is not None:
            self.index.join(worker.url)
            worker.follower = Follower(worker.url, channel, self.index)
            worker.follower.start()
        worker.healthy, worker.ending, worker.why, worker.missed = True, False, "", 0
        worker.doubted.clear()
        worker.life += 1
        told = "tells of its states" if channel else "does not tell what it holds (--hybrid-state-events published)"
        told = "decodes" if worker.role == "decode" else told
        counts = len(self.healthy), len(self.all)
        logger.info("worker %s is in, %d of %d: %s, %s", worker, *counts, worker.model, told)

    def _agreed(self, worker: Worker, server: str, info: dict[str, Any]) -> Channel | None:
        """Where `worker` tells of its states, None if it does not; ValueError where it cannot serve with the others."""
        model = _model(info)
        fingerprint = str(info.get("model_fingerprint") or "")
        others = [other for other in self._there if other is not worker]
        if server and (same := next((other for other in others if other.server == server), None)) is not None:
            raise ValueError(f"it is the same server as {same}: name it once, or it counts for two")
        if not others:  # nobody to agree with
            self._model, self._fingerprint, self.index = model, fingerprint, None
        if model != self._model:
            raise ValueError(f"it serves another model than the other workers: {model}, not {self._model}")
        if fingerprint and self._fingerprint and fingerprint != self._fingerprint:
            raise ValueError(
                f"it has other weights or another configuration than the other workers, under the same name: {model}"
            )
        if self._fits is not None:
            self._fits(worker, info, others)
        channel = Channel.of(info, worker.url)
        if channel is not None:
            if self.index is None:
                self.index = RestartIndex(channel.page_tokens)
            page, others_page = channel.page_tokens, self.index.page_tokens
            if page != others_page:
                raise ValueError(f"it has another --page-size than the other workers: {page}, not {others_page}")
        return channel

    def _forget(self, worker: Worker) -> None:
        if worker.follower is not None:
            worker.follower.stop()
            worker.follower = None
        if self.index is not None:
            self.index.leave(worker.url)

    def _get(self, worker: Worker, path: str, patience_s: float = PATIENCE_S) -> Any:
        timeout = aiohttp.ClientTimeout(total=patience_s)
        return self._session.get(worker.url + path, headers=self._headers, timeout=timeout)

    def shown(self) -> list[dict[str, Any]]:
        """What `/workers` says."""
        return [
            {
                "url": worker.url,
                "role": worker.role,
                "healthy": worker.healthy,
                "why": worker.why,
                "model": worker.model,
                "page_tokens": worker.page_tokens,
                "running": worker.running,
                "waiting_tokens": worker.waiting_tokens,
                "sent": worker.sent,
                "events": None if worker.follower is None else worker.follower.shown(),
            }
            for worker in self.all.values()
        ]


def _model(info: dict[str, Any]) -> str:
    return str(info.get("served_model_name") or info.get("model_path") or "")
