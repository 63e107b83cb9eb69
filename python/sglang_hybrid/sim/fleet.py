"""Simulated servers behind one router: what a routing policy brings, in hits and in seconds to the first token.

Policies and index are the router's own (`sglang_hybrid.routing`), the servers tell of what they hold as real ones do
(`sim/telling.py`), and the router hears of it after a lag. Sessions begin when they are told to (open loop); within one
the next request comes a pause after the answer before it. A server computes one prompt at a time, in order of arrival,
at a fixed pace, and decodes beside that at a fixed pace per request: batches and chunks are not simulated.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.routing import policies
from sglang_hybrid.routing.index import NOTHING, RestartIndex, block_hashes
from sglang_hybrid.sim.shape import Shape
from sglang_hybrid.sim.telling import Event, TellingServer
from sglang_hybrid.sim.trace import Trace, TraceRequest


@dataclass(frozen=True)
class FleetShape:
    """`servers` of one `shape` for `model`; each computes `prefill_tokens_per_s`, `overhead_s` per prompt beside that.

    Its events reach the router after `lag_s`. `exact`: no lag, and the router knows what is left of every queue.
    """

    model: ModelSpec
    shape: Shape
    servers: int
    prefill_tokens_per_s: float = 10_000.0
    overhead_s: float = 0.015
    decode_tokens_per_s: float = 60.0
    lag_s: float = 0.0
    exact: bool = False

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise ConfigError(f"give the fleet one server or more: {self.servers}")
        if not (self.prefill_tokens_per_s > 0 and self.decode_tokens_per_s > 0):
            paces = self.prefill_tokens_per_s, self.decode_tokens_per_s
            raise ConfigError(f"servers compute at a positive pace, in tokens a second: {paces}")
        if not (self.lag_s >= 0 and self.overhead_s >= 0):
            raise ConfigError(f"lag and overhead are seconds and not negative: {self.lag_s}, {self.overhead_s}")


class Failure(NamedTuple):
    """Server number `server` dies `at_s`, and is back with an empty cache after `down_s`."""

    at_s: float
    server: int
    down_s: float


class Turn(NamedTuple):
    """A request of a session, `pause_s` after the answer before it; `names` are its pages with the answer's."""

    request: TraceRequest
    names: Sequence[int]
    pause_s: float


def sessions(trace: Trace, shape: FleetShape) -> list[list[Turn]]:
    """The sessions of `trace` in order of their begin; what a server can never hold ends its session.

    Requests are of one session if their `turn`s count on; the pauses are the gaps between their arrivals.
    """
    found: list[list[Turn]] = []
    open_: dict[str, tuple[list[Turn], float]] = {}
    closed: set[str] = set()
    for request in trace.requests:
        if request.turn == 0:
            open_[request.session] = ([], request.ts)
            found.append(open_[request.session][0])
            closed.discard(request.session)
        turns, before = open_[request.session]
        if len(request.tokens) > shape.shape.kv_tokens or request.session in closed:
            closed.add(request.session)
            continue
        turns.append(Turn(request, block_hashes(request.tokens, shape.shape.grid), request.ts - before))
        open_[request.session] = turns, request.ts
    return [turns for turns in found if turns]


@dataclass
class Served:
    """What became of a request: when it came first, how often it was sent, where to, what it was promised and got."""

    prompt_tokens: int
    came_s: float
    first_token_s: float = -1.0
    server: int = -1
    promised_tokens: int = 0
    hit_tokens: int = 0
    sent: int = 0
    broken: bool = False  # the server died in the middle of its answer


@dataclass
class _Job:
    turns: Sequence[Turn]
    at: int
    served: Served
    counted: int = 0  # of `waiting_tokens`

    @property
    def turn(self) -> Turn:
        return self.turns[self.at]


@dataclass
class _Server:
    cache: TellingServer
    queue: deque[str] = field(default_factory=deque)
    jobs: dict[str, _Job] = field(default_factory=dict)
    prefilling: str | None = None
    ready_s: float = 0.0
    waiting_tokens: int = 0
    busy_s: float = 0.0
    up: bool = True
    lives: int = 0


class Fleet:
    """Plays sessions through servers behind a router with one policy of `routing.policies`."""

    def __init__(self, shape: FleetShape, policy: str | policies.Row) -> None:
        self.shape = shape
        row = policies.find(policy) if isinstance(policy, str) else policy
        self.now = 0.0
        self._policy = row.make(lambda: self.now)
        # As many as have slots for their states; SGLang keeps some for a pass.
        self._most_running = max(1, (shape.shape.states - shape.shape.wanted_states - 1) // (1 + shape.shape.buffers))
        self._row = row
        self.index = RestartIndex(shape.shape.grid)
        self.served: list[Served] = []
        self._events: list[tuple[float, int, str, int, object]] = []
        self._count = 0
        self._told: deque[tuple[float, int, int, Event]] = deque()
        self.servers = [_Server(self._fresh(number, 0)) for number in range(shape.servers)]
        self._homeless: deque[_Job] = deque()

    def play(self, found: Sequence[Sequence[Turn]], starts: Sequence[float], failures: Sequence[Failure] = ()) -> None:
        """Let every session begin at its start and every failure happen, until all answers have ended."""
        for turns, start in zip(found, starts, strict=True):
            self._at(start, "ask", 0, _Job(turns, 0, Served(turns[0].request.n_input, start)))
        for failure in failures:
            self._at(failure.at_s, "die", failure.server, failure.down_s)
        while self._events:
            self.now, _, what, number, about = heapq.heappop(self._events)
            if what == "ask":
                assert isinstance(about, _Job)
                about.served.came_s = self.now
                self.served.append(about.served)
                self._send(about)
            elif what == "die":
                assert isinstance(about, float)
                self._die(number, about)
            elif what == "back":
                self.servers[number].up = True
                while self._homeless:
                    self._send(self._homeless.popleft())
            else:
                assert isinstance(about, tuple)
                life, name = about
                if life == self.servers[number].lives:
                    (self._first_token if what == "first" else self._end)(number, name)

    def _fresh(self, number: int, life: int) -> TellingServer:
        """An empty cache; the router forgets what it knew of an earlier one."""
        self.index.join(str(number))

        def tell(event: Event) -> None:
            self._told.append((self.now + self.shape.lag_s, number, life, event))

        return TellingServer(self.shape.model, self.shape.shape, tell)

    def _at(self, when: float, what: str, number: int, about: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what, number, about))

    def _hear(self) -> None:
        while self._told and self._told[0][0] <= self.now:
            _, number, life, event = self._told.popleft()
            if life == self.servers[number].lives:
                self.index.apply(str(number), event)

    def _send(self, job: _Job) -> None:
        self._hear()
        request, names = job.turn.request, job.turn.names
        whole = (request.n_input - 1) // self.shape.shape.grid
        reaches = self.index.reaches_of(names[:whole]) if self._row.blocks else {}
        offers = {
            f"{number} {server.lives}": policies.Offer(
                reaches.get(str(number), NOTHING),
                self._waiting(server),
                len(server.jobs),
                len(server.jobs) >= self._most_running,
            )
            for number, server in enumerate(self.servers)
            if server.up
        }
        if not offers:
            self._homeless.append(job)
            return
        prompt = policies.Prompt(request.n_input, names[:whole], self.shape.shape.grid)
        chosen = self._policy.choose(prompt, offers)
        number, reach = int(chosen.split()[0]), offers[chosen].reach
        server = self.servers[number]
        job.served.promised_tokens = reach.resume_tokens if self._row.states else reach.kv_tokens
        job.served.server = number
        job.served.sent += 1
        job.counted = self._policy.left_tokens
        server.waiting_tokens += job.counted
        name = f"{len(self.served)} {job.served.sent} {self._count}"
        self._count += 1
        server.jobs[name] = job
        server.queue.append(name)
        self._start(number)

    def _waiting(self, server: _Server) -> int:
        """Tokens of prompts whose first token has not come, as the router counts them, or as they are."""
        if not self.shape.exact:
            return server.waiting_tokens
        running = max(0.0, server.ready_s - self.now) if server.prefilling else 0.0
        left = running * self.shape.prefill_tokens_per_s
        return int(left) + sum(server.jobs[name].counted for name in server.queue)

    def _start(self, number: int) -> None:
        """Begin with the prompt whose turn it is, if nothing is computed and there is room."""
        server, shape = self.servers[number], self.shape
        if server.prefilling is not None or not server.queue:
            return
        name = server.queue[0]
        job = server.jobs[name]
        request, cache = job.turn.request, server.cache
        if not cache.room_for(len(request.tokens)):
            return
        server.queue.popleft()
        cache.names[name] = job.turn.names
        answer = max(0, request.n_output - 1)
        hit = cache.arrive(name, request.input_tokens, self.now, None, request.boundaries, answer_tokens=answer)
        job.served.hit_tokens = hit
        seconds = shape.overhead_s + (request.n_input - hit) / shape.prefill_tokens_per_s
        server.prefilling, server.ready_s = name, self.now + seconds
        server.busy_s += seconds
        self._at(server.ready_s, "first", number, (server.lives, name))

    def _first_token(self, number: int, name: str) -> None:
        server = self.servers[number]
        job = server.jobs[name]
        request = job.turn.request
        answer = max(0, request.n_output - 1)
        job.served.first_token_s = self.now
        server.waiting_tokens -= job.counted
        server.prefilling = None
        server.cache.decode(name, answer, self.now)
        self._at(self.now + answer / self.shape.decode_tokens_per_s, "end", number, (server.lives, name))
        self._start(number)

    def _end(self, number: int, name: str) -> None:
        server = self.servers[number]
        job = server.jobs.pop(name)
        request = job.turn.request
        computed = max(request.n_input, len(request.tokens) - 1)
        server.cache.finish(name, request.tokens[:computed], self.now)
        del server.cache.names[name]
        self._start(number)
        self._next(job)

    def _next(self, job: _Job) -> None:
        if job.at + 1 < len(job.turns):
            turn = job.turns[job.at + 1]
            served = Served(turn.request.n_input, self.now)
            self._at(self.now + turn.pause_s, "ask", 0, _Job(job.turns, job.at + 1, served))

    def _die(self, number: int, down_s: float) -> None:
        """Its cache is lost. Requests without a first token are sent again, answers under way break off."""
        server = self.servers[number]
        if not server.up:
            return
        jobs = list(server.jobs.values())
        lives = server.lives + 1
        self.servers[number] = _Server(self._fresh(number, lives), up=False, lives=lives, busy_s=server.busy_s)
        self._at(self.now + down_s, "back", number, None)
        for job in jobs:
            if job.served.first_token_s < 0:
                self._send(job)
            else:
                job.served.broken = True
                self._next(job)
