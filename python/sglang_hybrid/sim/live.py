"""A server's request log through a simulated server: the same hits, or those that another one would have had."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.memory.sizing import Kinds, Sizing
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.replay import logged_hints, model_of, read_log
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.prefix.tree.tokens import Tokens
from sglang_hybrid.sim.elastic import ElasticServer
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.shape import Shape


@dataclass
class Live:
    """Of a log's requests, in order: tokens hit as `served`, tokens hit as `simulated`, and tokens of `prompts`.

    `marking` of them marked segments, which are simulated as plain text (`sim.segments` plays them).
    """

    served: list[int] = field(default_factory=list)
    simulated: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    marking: int = 0

    @property
    def different(self) -> int:
        """Requests that the simulated server served another hit."""
        return sum(a != b for a, b in zip(self.served, self.simulated, strict=True))


@dataclass
class _Running:
    prompt: Tokens
    answer: Tokens
    arrived_s: float
    ends_s: float
    decoded: int = 0


class _Timed(SimulatedServer):
    """Evicts at the times of the log, so that ages are those of the server."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.times: deque[float] = deque()

    def victim(self, pool: PoolKind, now: float) -> Node | None:
        return super().victim(pool, self.times.popleft() if self.times else now)

    def weakest(
        self, pool: PoolKind, contenders: dict[int, Candidate], count: int, now: float
    ) -> tuple[list[Node], list[int]]:
        victims, lost = super().weakest(pool, contenders, count, self.times[0] if self.times else now)
        for _ in range(min(count, len(victims) + len(lost) + 1, len(self.times))):  # the log asks once more in vain
            self.times.popleft()
        return victims, lost


class _Elastic(_Timed, ElasticServer):
    """The same over one budget."""


def simulate(path: Path, policy: str = "", states: int = 0, kv_tokens: int = 0, model: ModelSpec | None = None) -> Live:
    """Send the requests of the log at `path` through a simulated server; what is not given is as it was.

    With both sizes given it has two pools of those, also where the log's server had elastic memory. Requests that ran
    side by side are assumed to decode at an even pace, and to be prefilled one after the other. Raises ConfigError for
    what is no log, and where a size is neither given nor known.
    """
    lines = list(read_log(path))
    settings = lines[0][1]
    costs, name = model or model_of(settings), policy or settings["policy"]
    sizing = None if states or kv_tokens else _sizing(settings)
    if sizing is None:
        states, kv_tokens = states or settings["states"], kv_tokens or settings["kv_tokens"]
        if not states or not kv_tokens:
            raise ConfigError(
                f"give the sizes of both pools (--states, --kv-tokens), this log does not say them: {path}"
            )
    else:
        states, kv_tokens = sizing.states, sizing.tokens
    rest = {name: int(settings[name]) for name in ("chunk_tokens", "buffers", "track_tokens", "pass_states")}
    page = settings["page"]  # 0 where the server could not be played, and said no step
    shape = Shape(states, kv_tokens, settings["grid"], settings["step"] if page else 1, page=page or 1, **rest)
    server = _Timed(costs, shape, name) if sizing is None else _Elastic(costs, shape, sizing, name)
    return _Feed(server, [line for _, line in lines[1:] if line]).run()


def _sizing(settings: dict[str, Any]) -> Sizing | None:
    """Of a server with elastic memory; None for others."""
    if not settings["budget_bytes"]:
        return None
    kinds = Kinds(settings["kv_row_bytes"], settings["kv_planes"], settings["page"], settings["state_bytes"])
    return Sizing(kinds, settings["granule_bytes"], settings["budget_bytes"], settings["request_states"])


class _Feed:
    """Plays the events of a log, in its order."""

    def __init__(self, server: _Timed, lines: list[list[Any]]) -> None:
        self.server, self.live = server, Live()
        self._lines = lines
        self._running: dict[str, _Running] = {}
        self._ends = {line[1]: line for line in lines if line[0] == "finish"}

    def run(self) -> Live:
        for line, times in self._events():
            self.server.times = deque(times)
            if line[0] == "arrive":
                self._arrive(*line[1:])
            else:
                self._advance(line[2])
                self._finish(line[1], line[2])
        return self.live

    def _events(self) -> Iterator[tuple[list[Any], list[float]]]:
        """Arrivals and ends, with the times at which something was evicted for them: also those of later chunks."""
        times: list[float] = []
        prefill: list[Any] | None = None
        for line in self._lines:
            if prefill is not None and line[0] in ("computed", "arrive", "finish"):
                yield prefill, times
                prefill, times = None, []
            if line[0] == "victim":
                times.append(line[2])
            elif line[0] == "seed":
                self.server.decisions.seed(np.array(line[3], np.int32), line[1], str(line[2]))
            elif line[0] == "segments":
                self.live.marking += 1
            elif line[0] == "arrive":
                prefill = line
            elif line[0] == "finish":
                yield line, times
                times = []
        if prefill is not None:
            yield prefill, times

    def _arrive(
        self, name: str, now: float, namespace: int, cached: int, kv: int, limit: int, boundaries: list[int],
        tokens: list[int], positions: list[int], seen: int, hints: list[Any],
    ) -> None:  # fmt: skip
        self._advance(now)
        prompt = np.array(tokens, np.int32)
        end = self._ends.get(name)
        answer_tokens = 0 if end is None else max(0, end[3] + 1 - len(tokens))  # nobody computes the last
        found = self.server.arrive(
            name, prompt, now, str(namespace), tuple(boundaries), limit, answer_tokens, logged_hints(hints)
        )
        self.live.served.append(cached)
        self.live.simulated.append(found)
        self.live.prompts.append(len(tokens))
        if end is None:  # it still ran when the log ended
            self._running[name] = _Running(prompt, prompt[:0], now, now)
            return
        answer = np.array(end[4], np.int32)[: max(0, end[3] - len(tokens))]
        self._running[name] = _Running(prompt[: end[3]], answer, now, end[2])

    def _advance(self, now: float) -> None:
        """Let what runs decode up to the time `now`."""
        for name, run in self._running.items():
            share = 1.0 if now >= run.ends_s else (now - run.arrived_s) / (run.ends_s - run.arrived_s)
            due = max(run.decoded, int(share * run.answer.size))
            self.server.decode(name, due - run.decoded, now)
            run.decoded = due

    def _finish(self, name: str, now: float) -> None:
        run = self._running.pop(name, None)
        if run is not None:
            self.server.finish(name, np.concatenate((run.prompt, run.answer)), now)
