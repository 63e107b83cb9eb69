"""Seeded load shapes: what clients do in one simulated hour, as a list of events in order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from tests.simulation.fingerprint import answer

Prompt = list[int]


@dataclass
class Event:
    """At `seconds` a client sends a request, hangs up on one (`abort`), or an operator flushes the cache, pauses the
    scheduler by one of SGLang's modes (`pause`), or lets it `go` on.

    The answer ends at the first of the tokens `stops`, which are asked for as strings. `more` are fields of SGLang's
    request: priority, extra_key, boundaries.
    """

    seconds: float
    rid: str = ""
    prompt: Prompt = field(default_factory=list)
    new_tokens: int = 0
    abort: bool = False
    flush: bool = False
    pause: str = ""
    go: bool = False
    stops: tuple[int, ...] = ()
    more: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """What one server can hold: `context` tokens a request, `states` slots, `rows` requests at once.

    `longest` is the longest prompt that it accepts.
    """

    context: int
    states: int
    rows: int
    longest: int


Shape = Callable[[Random, Limits, str], Iterator[Event]]


def text(random: Random, tokens: int) -> Prompt:
    return [random.randrange(33, 123) for _ in range(tokens)]


def conversations(random: Random, limits: Limits, name: str) -> Iterator[Event]:
    """Chats over a few system prompts, turn upon turn, with time to think in between."""
    systems = [text(random, random.randrange(20, limits.context // 6)) for _ in range(3)]
    for chat in range(random.randrange(6, 16)):
        prompt, seconds = list(random.choice(systems)), random.uniform(0, 600)
        marked = {"boundaries": [len(prompt)]} if random.random() < 0.3 else {}
        for turn in range(random.randrange(1, 8)):
            prompt = prompt + text(random, random.randrange(4, 60))
            count = random.randrange(1, 10)
            if len(prompt) + count > limits.context:
                break
            yield Event(seconds, f"{name}-{chat}-{turn}", list(prompt), count, more=dict(marked))
            prompt += answer(prompt, count)
            seconds += random.expovariate(1 / 40)


def burst(random: Random, limits: Limits, name: str) -> Iterator[Event]:
    """About as many requests at once as there are states, or far more; often on an empty cache, sometimes all equal."""
    equal = random.random() < 0.4
    if random.random() < 0.7:
        yield Event(99.0, flush=True)
    first = text(random, random.randrange(10, 70))
    for number in range(
        random.choice((limits.states - 1, limits.states, limits.states + 1, 2 * limits.states, 4 * limits.states))
    ):
        prompt = first if equal else text(random, random.randrange(10, 70))
        yield Event(100.0, f"{name}-{number}", list(prompt), random.randrange(1, 5))


def giants(random: Random, limits: Limits, name: str) -> Iterator[Event]:
    """Prompts that fill the pool of KV, among dwarfs that could be served in between."""
    for number in range(random.randrange(2, 5)):
        size = random.randrange(limits.context * 3 // 4, limits.context - 8)
        yield Event(random.uniform(0, 60), f"{name}-giant-{number}", text(random, size), 4)
    for number in range(random.randrange(20, 60)):
        yield Event(random.uniform(0, 60), f"{name}-dwarf-{number}", text(random, random.randrange(2, 40)), 3)


def long_answers(random: Random, limits: Limits, name: str) -> Iterator[Event]:
    """Short prompts whose answers outgrow the pool of KV together: SGLang retracts some of them."""
    for number in range(limits.rows * 2):
        count = limits.context // random.randrange(4, 16)
        yield Event(random.uniform(0, 5), f"{name}-{number}", text(random, random.randrange(4, 40)), count)


def documents(random: Random, limits: Limits, name: str) -> Iterator[Event]:
    """Questions about shared documents, whose ends some clients declare; tenants that must not meet."""
    shelf = [text(random, random.randrange(60, limits.context // 2)) for _ in range(random.randrange(2, 9))]
    for number in range(random.randrange(20, 70)):
        document = random.choice(shelf)
        more: dict[str, object] = {}
        if random.random() < 0.5:
            more["boundaries"] = sorted({len(document), *random.sample(range(1, len(document)), 3)})
        if random.random() < 0.3:
            more["extra_key"] = random.choice("ab")
        prompt = document + text(random, random.randrange(1, 40))
        yield Event(random.uniform(0, 300), f"{name}-{number}", prompt, random.randrange(1, 6), more=more)


def scan(random: Random, limits: Limits, name: str) -> Iterator[Event]:
    """Prompts that nobody sends twice."""
    for number in range(random.randrange(20, 80)):
        prompt = text(random, random.randrange(5, limits.context // 2))
        yield Event(random.uniform(0, 120), f"{name}-{number}", prompt, random.randrange(1, 6))


def hang_ups(random: Random, limits: Limits, name: str) -> Iterator[Event]:
    """Clients that leave while they wait, in mid-prefill or in mid-answer, and come back with the same prompt."""
    for number in range(random.randrange(20, 60)):
        seconds, prompt = random.uniform(0, 120), text(random, random.randrange(5, limits.context // 2))
        rid = f"{name}-{number}"
        yield Event(seconds, rid, prompt, random.randrange(1, 25))
        yield Event(seconds + random.expovariate(2.0), rid, abort=True)
        if random.random() < 0.5:
            yield Event(seconds + random.uniform(1, 4), rid + "-again", prompt, random.randrange(1, 8))


def flushes(random: Random, limits: Limits, name: str) -> Iterator[Event]:
    """The cache is flushed again and again under a conversation."""
    yield from conversations(random, limits, name)
    for _ in range(4):
        yield Event(random.uniform(0, 700), flush=True)


def pauses(random: Random, limits: Limits, name: str) -> Iterator[Event]:
    """Weights are trained beside the server: it pauses in the middle of everything, and is mostly flushed meanwhile."""
    shelf = [text(random, random.randrange(60, limits.context // 2)) for _ in range(3)]
    for wave in range(8):
        began = 60.0 * wave
        for number in range(random.randrange(4, 3 * limits.rows)):
            prompt = random.choice(shelf) + text(random, random.randrange(1, 60))
            more: dict[str, object] = {"boundaries": [len(prompt) - 1]} if random.random() < 0.3 else {}
            rid = f"{name}-{wave}-{number}"
            yield Event(began + random.uniform(0, 0.2), rid, prompt, random.randrange(1, 60), more=more)
            if random.random() < 0.1:
                yield Event(began + random.uniform(0, 2), rid, abort=True)
        for at in sorted(random.uniform(0, 1) for _ in range(random.randrange(1, 4))):
            yield Event(began + at, pause=random.choice(("retract", "retract", "in_place")))
            if random.random() < 0.7:
                yield Event(began + at + 1e-4, flush=True)
            yield Event(began + at + 2e-4, go=True)


def longest(random: Random, limits: Limits, name: str) -> Iterator[Event]:
    """Prompts as long as the server accepts them, and one token less, in front of others."""
    for number in range(8):
        for size in (limits.longest - number % 2, random.randrange(4, 40)):
            yield Event(20.0 * number, f"{name}-{number}-{size}", text(random, size), 1)


def stops(random: Random, limits: Limits, name: str) -> Iterator[Event]:
    """Chats whose answers end at a string, mostly in the middle of a run of accepted tokens, or after one token."""
    for chat in range(random.randrange(6, 16)):
        prompt, seconds = text(random, random.randrange(20, limits.context // 4)), random.uniform(0, 300)
        for turn in range(random.randrange(2, 8)):
            ends = tuple(random.sample(range(33, 97), random.randrange(1, 6)))  # the others are no characters
            count = random.choice((1, 1, random.randrange(2, 120)))
            if len(prompt) + count > limits.context:
                break
            yield Event(seconds, f"{name}-{chat}-{turn}", list(prompt), count, stops=ends)
            prompt += answer(prompt, count, ends)[: random.choice((-1, count))]  # with the stop, or without it
            prompt += text(random, random.randrange(1, 60))
            seconds += random.expovariate(1 / 20)


def full_contexts(random: Random, limits: Limits, name: str) -> Iterator[Event]:
    """Answers that run to the end of the context, several at once, and those that follow in their memory."""
    for number in range(2 * limits.rows + 2):
        prompt = text(random, random.randrange(limits.longest // 2, limits.longest))
        yield Event(random.uniform(0, 60), f"{name}-{number}", prompt, limits.longest + 5 - len(prompt))


SHAPES = (conversations, burst, giants, long_answers, documents, scan, hang_ups, flushes)
NAMED = (*SHAPES, pauses, stops, longest, full_contexts)


def day(
    seed: int, limits: Limits, hours: int, priorities: bool = False, shapes: Sequence[Shape] = SHAPES
) -> list[Event]:
    """`hours` hours of one to three `shapes` each, all of which come up in turn; events in order of time."""
    random = Random(seed)
    order = [shape for _ in range(-(-hours // len(shapes))) for shape in random.sample(shapes, len(shapes))]
    events: list[Event] = []
    for hour in range(hours):
        for number, shape in enumerate([order[hour], *random.choices(shapes, k=random.randrange(3))]):
            for event in shape(random, limits, f"{hour}-{shape.__name__}-{number}"):
                event.seconds += 3600.0 * hour
                if priorities and event.prompt:
                    event.more["priority"] = random.randrange(3)
                events.append(event)
    return sorted(events, key=lambda event: event.seconds)
