"""One worker of a router: its address, what it is, whether it is well."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_hybrid.cluster.channel import Follower
from sglang_hybrid.core import addresses
from sglang_hybrid.core.errors import ConfigError


@dataclass
class Worker:
    """One server by its `url`. `waiting_tokens` and `running` are of requests that this router has sent there.

    `missed`: looks in a row that it did not answer in time. `reading`: prompts that it is asked to tokenise just now.
    `life` counts how often it came: what a policy remembers of an earlier one does not hold for the next.
    `server` is the one start of it that was met, "" where it does not say; `ending`: it was told to stop since.
    `most_running`: requests that it runs at once, 0 where it does not say. `doubted` is set from the moment that one of
    its connections broke off until a look shows whether it lives.
    """

    url: str
    role: str = ""
    healthy: bool = False
    why: str = "not looked at yet"
    model: str = ""
    context_tokens: int = 0
    page_tokens: int = 0
    most_running: int = 0
    running: int = 0
    waiting_tokens: int = 0
    sent: int = 0
    missed: int = 0
    reading: int = 0
    life: int = 0
    server: str = ""
    ending: bool = False
    follower: Follower | None = field(default=None, repr=False)
    deadlines: set[asyncio.Timeout] = field(default_factory=set, repr=False)
    doubted: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """What policies know it by."""
        return f"{self.url} {self.life}"

    @property
    def there(self) -> bool:
        """Whether it was met and has not been found to be gone since."""
        return self.healthy or self.ending or self.doubted.is_set()

    @property
    def full(self) -> bool:
        """Whether a request more would wait until one ends."""
        return 0 < self.most_running <= self.running


def in_time(workers: Mapping[str, Worker]) -> Mapping[str, Worker]:
    """Those of `workers` that answered the last look in time, or all of them: one that hangs is out only after some."""
    return {url: worker for url, worker in workers.items() if not worker.missed} or workers


def most_running(info: Mapping[str, Any]) -> int:
    """Requests that a server runs at once by its `/server_info`, 0 where it does not say."""
    found = info.get("internal_states")
    states = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    said = [each.get("effective_max_running_requests_per_dp") for each in states]
    return sum(most for most in said if isinstance(most, int) and most > 0)


def checked(urls: list[str]) -> list[str]:
    """The addresses of workers without what is too much; raises ConfigError for one that is none, or there twice."""
    found: list[str] = []
    for url in urls:
        whole = "://" in url
        parts = addresses.server(url if whole else f"http://{url}")
        if parts is None or (not whole and parts.port is None) or parts.query or parts.username:
            # a word alone is no address either
            raise ConfigError(f"a worker is the address of a server, such as http://10.0.0.1:30000: {url}")
        name = f"{parts.scheme}://{parts.netloc}"
        if name in found:
            raise ConfigError(f"a worker is named once: {url}")
        found.append(name)
    if not found:
        raise ConfigError("a router has one worker or more: --worker http://HOST:PORT")
    return found
