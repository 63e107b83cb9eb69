"""A simulated day: SGLang's scheduler and our cache under seeded load, with what must hold checked on the way.

`python -m tests.simulation.day --hours 240 --seed 7 -- --max-mamba-cache-size 20` runs ten days of one configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from hashlib import sha256
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from sglang_hybrid.plugin import activate_platform
from tests.simulation.fingerprint import answer
from tests.simulation.late import LONGEST, put_off
from tests.simulation.load import NAMED, SHAPES, Event, Limits, day
from tests.simulation.scheduler import Clock, SimulatedScheduler

if __name__ == "__mp_main__":
    activate_platform()  # 0.5.17 needs it before anything of SGLang is imported

STUCK = 3
"""Turns of the loop in which nobody runs although somebody waits: one more is a scheduler that hangs.

Copies that end late may keep all memory that long.
"""

PREFILL_S, DECODE_S, TOKEN_S = 2e-3, 1e-2, 5e-5
"""Simulated seconds of a prefill, of a step of decoding, and of each token of a prefill."""


@dataclass
class Plan:
    """One day on one server: SGLang's and our `flags`, `ranks` of tensor parallelism, names of the load `shapes` that
    come up (all if there is none), a fault to put in, the kernel whose states the `prefill` gives back, and whether
    copies to and from a host tier end `late`."""

    seed: int
    hours: int
    flags: tuple[str, ...] = ()
    ranks: int = 1
    shapes: tuple[str, ...] = ()
    fault: str = ""
    prefill: str = "triton"
    late: bool = False


class Violation(AssertionError):
    """What must always hold did not."""


class Day:
    """Runs one plan on one rank. The first rank sends the load; the others follow it through SGLang's broadcast."""

    def __init__(self, server: SimulatedScheduler, events: list[Event], leads: bool, in_order: bool) -> None:
        self.server, self.clock = server, server.clock
        self.events, self._next, self._leads, self._in_order = events, 0, leads, in_order
        self._sent: dict[str, Event] = {}
        self._idle_turns = 0
        self.steps = 0
        self.decisions = sha256()
        self.stamps: set[float] = set()

    def run(self) -> dict[str, Any]:
        while not self.server.scheduler.gracefully_exit:
            if self._leads:
                self._send_due()
            self._turn()
        self._judge()
        return {
            "steps": self.steps, "requests": len(self.events), "decisions": self.decisions.hexdigest(),
            "hit_tokens": sum(self.server.cached.values()), "stamps": len(self.stamps),
            "counts": dict(self.server.coordinator.account.counts) if self.server.coordinator else {},
            "outputs": dict(self.server.counts), "end_s": self.clock.seconds,
            "tokens_per_verification": self.server.verified[1] / max(1, self.server.verified[0]),
        }  # fmt: skip

    def _send_due(self) -> None:
        while self._next < len(self.events) and self.events[self._next].seconds <= self.clock.seconds:
            event = self.events[self._next]
            self._next += 1
            if event.flush:
                self.server.flush()
            elif event.pause:
                self.server.pause(event.pause)
            elif event.go:
                self.server.go()
            elif event.abort:
                if event.rid not in self.server.finished:
                    self.server.abort(event.rid)
            else:
                self._sent[event.rid] = event
                self.server.submit(event.rid, event.prompt, event.new_tokens, event.stops, **event.more)

    def _turn(self) -> None:
        batch = self.server.step()
        self.steps += 1
        if batch is None:
            self._nobody_ran()
            return
        self._idle_turns = 0
        ran, extends = [request.rid for request in batch.reqs], batch.forward_mode.is_extend()
        lengths = (batch.prefix_lens, batch.extend_lens) if extends else ()
        self.decisions.update(repr((ran, lengths)).encode())
        if extends:
            self.clock.seconds += PREFILL_S + TOKEN_S * sum(batch.extend_lens or ())
        else:
            self.clock.seconds += DECODE_S
        if self.server.coordinator is not None:
            self.stamps.add(self.server.coordinator.now())
            if self.steps % 500 == 0:
                self._check_books()

    def _nobody_ran(self) -> None:
        if self.server.scheduler._engine_paused:
            if self._leads:
                self.clock.seconds = max(self.clock.seconds, self.events[self._next].seconds)
        elif self.server.waiting or self.server.scheduler.running_batch.reqs:
            self._idle_turns += 1
            if self._idle_turns > STUCK + LONGEST * bool(self.server.counts["late_copies"]):
                raise Violation(f"{self.server.waiting} requests wait, nobody runs, and nothing changes")
        elif not self._leads:
            return
        elif self._next < len(self.events):
            self.clock.seconds = max(self.clock.seconds, self.events[self._next].seconds)
        else:
            self.server.shut_down()

    def _check_books(self) -> None:
        coordinator = self.server.coordinator
        coordinator.decisions.check()
        if coordinator.scores:
            missing = coordinator.victims.missing(coordinator.cache.tree_core)
            if missing:
                raise Violation(f"nodes that the index of victims does not know, or should not: {missing}")
        nodes = [n for n in coordinator.cache.tree_core._node_arena.values() if getattr(n, "hybrid_mark", None)]
        if len({id(node.hybrid_mark) for node in nodes}) < len(nodes):
            raise Violation("two states have one mark: the use of one would leave the price of the other")

    def _judge(self) -> None:
        """The day is over: every request has its answer, and nobody holds anything."""
        for rid, event in self._sent.items():
            if rid not in self.server.finished:
                raise Violation(f"a request was never answered: {rid}")
            output = self.server.finished[rid]
            if output is not None and output != answer(event.prompt, event.new_tokens, event.stops):
                raise Violation(f"a wrong answer to {rid}, {self.server.cached[rid]} tokens from the cache")
        if self._leads and self._in_order:
            due = [rid for rid in self._sent if rid in self.server.cached]
            late = next((pair for pair in zip(due, self.server.admitted, strict=True) if pair[0] != pair[1]), None)
            if late is not None:
                raise Violation(f"{late[1]} was admitted before {late[0]}, which had come earlier")
        held = self.server.scheduler
        coordinator = self.server.coordinator
        if coordinator is not None:
            self._check_books()
            if len(coordinator.slots):
                raise Violation(f"checkpoints in the making are left: {len(coordinator.slots)}")
            if len(self.events) > 100 and len(self.stamps) < 10:
                raise Violation(f"time stands still: {len(self.events)} requests at {sorted(self.stamps)}")
        cache = held.tree_cache
        if self.server.counts["late_copies"]:
            self.server.turns += LONGEST
            cache.check_hicache_events()
        if cache.full_protected_size() or cache.mamba_protected_size():
            raise Violation(f"locks are left: {cache.full_protected_size()}, {cache.mamba_protected_size()}")
        if not held.flush_cache():
            raise Violation("a server that is idle cannot be flushed")
        slots, states = held.token_to_kv_pool_allocator, held.req_to_token_pool.mamba_allocator
        free = (slots.available_size(), states.available_size())
        if free != (slots.size, states.size):
            raise Violation(f"of {slots.size} tokens and {states.size} states are free after a flush: {free}")


def prepare(plan: Plan, model: Path) -> tuple[Any, Any]:
    """SGLang's arguments and ports as the launcher makes them."""
    from sglang_hybrid.engine.launch import flags, preparation

    ranks = ("--tp", str(plan.ranks)) if plan.ranks > 1 else ()
    config, rest = flags.split(["--model-path", str(model), "--log-level", "error", *ranks, *plan.flags])
    preparation.enter(rest, config, None)
    final, _ = preparation.complete(flags.parse_engine(rest), rest, config)
    from sglang.srt.server_args import PortArgs, prepare_server_args

    prepared = prepare_server_args(final)
    if hasattr(prepared, "resolve_once"):
        prepared.resolve_once()  # 0.5.17 has done so
    return prepared, PortArgs.init_new(prepared)


def _rank(plan: Plan, rank: int, server_args: Any, port_args: Any, results: Any) -> None:
    """One process. A violation is a result; any other error ends it with its traceback."""
    put_in(plan.fault)
    if plan.prefill == "flashinfer":
        from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

        TritonGDNKernel.uses_state_checkpoints = True  # SGLang plans FlashInfer's checkpoints; `fingerprint` has them
    server = SimulatedScheduler(server_args, port_args, rank, Clock(1000.0 + 977.0 * rank))
    if plan.late:
        put_off(server, plan.seed)
    held = server.scheduler
    limits = Limits(
        min(held.max_total_num_tokens * 9 // 10, held.max_req_input_len) - 64,
        held.req_to_token_pool.mamba_allocator.size,
        held.max_running_requests,
        held.max_req_input_len - 1,
    )
    priorities = "--enable-priority-scheduling" in plan.flags
    shapes = [shape for shape in NAMED if shape.__name__ in plan.shapes] or list(SHAPES)
    events = day(plan.seed, limits, plan.hours, priorities, shapes)
    for event in events:
        event.seconds += server.clock.seconds
    in_order = not priorities and "--schedule-policy" not in plan.flags
    try:
        results.send((rank, Day(server, events if rank == 0 else [], rank == 0, in_order).run(), None))
    except AssertionError as error:  # a violation, or an assertion of SGLang's
        results.send((rank, None, f"{type(error).__name__}: {error}"))
    os._exit(0)  # SGLang's threads and process groups would wait for each other


def put_in(fault: str) -> None:
    """Bring a fault back that was mended, or one of its kind, to see that the day finds it."""
    from sglang_hybrid.engine.cache import clock, hooks
    from sglang_hybrid.engine.cache.passes import forward

    if fault == "slots set aside":
        hooks.set_aside = lambda original, slots, count: original(slots, count)
    elif fault == "time stands still":
        clock.stamp = lambda *_: None
    elif fault == "state of another position":
        rows = forward._rows

        def shifted(*given: Any, **more: Any) -> Any:
            moved = {forward._Source.CHUNK: (-1, 0), forward._Source.INSIDE: (0, -1)}
            shifts = [(row, *moved.get(row.source, (0, 0))) for row in rows(*given, **more)]
            return [replace(row, first=max(row.first + a, 0), second=row.second + b) for row, a, b in shifts]

        forward._rows = shifted
    elif fault:
        raise ValueError(f"choose a fault out of {', '.join(FAULTS)}: {fault}")


FAULTS = ("slots set aside", "time stands still", "state of another position")


def simulate(plan: Plan, model: Path) -> list[dict[str, Any]]:
    """Run `plan`, a process for each rank; what each found. Raises Violation with what was wrong."""
    context = get_context("spawn")
    server_args, port_args = prepare(plan, model)
    pipes = [context.Pipe(duplex=False) for _ in range(plan.ranks)]
    ranks = [
        context.Process(target=_rank, args=(plan, rank, server_args, port_args, sender))
        for rank, (_, sender) in enumerate(pipes)
    ]
    found: dict[int, dict[str, Any]] = {}
    try:
        for process, (_, sender) in zip(ranks, pipes, strict=True):
            process.start()
            sender.close()  # so that the end of the process is the end of the pipe
        while len(found) < plan.ranks:
            for receiver in wait([receiver for receiver, _ in pipes if not receiver.closed], timeout=900):
                try:
                    rank, result, error = receiver.recv()
                except EOFError:
                    raise Violation("a rank died; its traceback stands above") from None
                if error is not None:
                    raise Violation(f"rank {rank}: {error}")
                found[rank] = result
                receiver.close()
    finally:
        for process in ranks:
            process.kill()
    if len({result["decisions"] for result in found.values()}) > 1:
        raise Violation("the ranks ran different batches")
    return [found[rank] for rank in sorted(found)]


def main() -> int:
    from sglang_hybrid.demo import model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shapes", nargs="*", choices=[shape.__name__ for shape in NAMED], default=())
    parser.add_argument("--fault", choices=FAULTS, default="")
    parser.add_argument("--preset", choices=("gdn", "kda", "mamba2", "conv", "mtp"), default="gdn")
    parser.add_argument("--prefill", choices=("triton", "flashinfer"), default="triton")
    parser.add_argument("--late", action="store_true", help="copies to and from a host tier end late")
    parser.add_argument("--model", type=Path, help="folder of the preset, built if need be")
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    folder = model.build(given.model or Path("models") / f"demo-{given.preset}", given.preset)
    shapes = tuple(given.shapes)
    more = (given.fault, given.prefill, given.late)
    plan = Plan(given.seed, given.hours, tuple(given.flags), given.ranks, shapes, *more)
    try:
        print(json.dumps(simulate(plan, folder)))  # noqa: T201
    except Violation as error:
        print(f"violation: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
