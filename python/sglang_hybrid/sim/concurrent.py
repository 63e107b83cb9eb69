"""A trace through a simulated server whose requests run side by side."""

import heapq

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.sim.replay import Ints
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.trace import Trace, TraceRequest


def serve(trace: Trace, server: SimulatedServer, concurrency: int, tokens_per_s: float) -> Ints:
    """Tokens hit per request, shape [requests]: at most `concurrency` run at once, each decodes at `tokens_per_s`.

    A request whose turn it is waits until one that runs has ended, if there are too many or memory is short; one that
    the server can never hold is refused and hits nothing. Prefills take no time. Raises ConfigError for numbers that
    are not positive.
    """
    if concurrency < 1 or not tokens_per_s > 0:
        raise ConfigError(f"run one request or more at a positive pace: {concurrency}, {tokens_per_s}")
    hits = np.zeros(len(trace), dtype=np.int64)
    running = _Running(server, tokens_per_s)
    now = 0.0
    for i, request in enumerate(trace.requests):
        if not server.holds(request.tokens.size):
            continue
        now = max(now, request.ts)
        running.end_until(now)
        while len(running) >= concurrency or not server.room_for(request.tokens.size):
            now = max(now, running.end_next())
        running.decode(now)
        hits[i] = running.start(str(i), request, now)
    while len(running):
        running.end_next()
    return hits


class _Running:
    """Requests under way, by when they end."""

    def __init__(self, server: SimulatedServer, tokens_per_s: float) -> None:
        self._server, self._pace = server, tokens_per_s
        self._ends: list[tuple[float, str]] = []
        self._requests: dict[str, tuple[TraceRequest, float, int]] = {}  # with its start, and how much it has decoded

    def __len__(self) -> int:
        return len(self._ends)

    def start(self, name: str, request: TraceRequest, now: float) -> int:
        prompt = request.tokens[: request.n_input]
        hit = self._server.arrive(
            name, prompt, now, None, request.boundaries, answer_tokens=self._answer(request), hints=request.hints
        )
        self._requests[name] = request, now, 0
        heapq.heappush(self._ends, (now + self._answer(request) / self._pace, name))
        return hit

    def decode(self, now: float) -> None:
        """Everything that runs has decoded as much as it can have by `now`."""
        for name, (request, started, done) in self._requests.items():
            due = min(self._answer(request), int((now - started) * self._pace))
            self._server.decode(name, max(0, due - done), now)
            self._requests[name] = request, started, max(due, done)

    def end_until(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            self.end_next()

    def end_next(self) -> float:
        """Let the request end that does so first; returns when."""
        end, name = heapq.heappop(self._ends)
        self.decode(end)
        request, _, done = self._requests.pop(name)
        answer = self._answer(request)
        self._server.decode(name, answer - done, end)
        self._server.finish(name, request.tokens[: request.n_input + answer], end)
        return end

    @staticmethod
    def _answer(request: TraceRequest) -> int:
        """Tokens of the answer that are computed: nobody computes the last."""
        return max(0, int(request.tokens.size) - request.n_input - 1)
