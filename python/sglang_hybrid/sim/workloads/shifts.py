"""Workloads whose past misleads: what was used often, lately or at length is not what is used next.

Requests are prompts out of small sets, each with a question of its own behind it. Every seed draws other sizes, so that
a policy cannot be right by luck for all of them. `tick_s` rounds the stamps down: 1 gives whole seconds, 1e9 one stamp.
"""

from collections.abc import Callable, Iterator

import numpy as np

from sglang_hybrid.sim.trace import Tokens, TraceRequest
from sglang_hybrid.sim.workloads.draw import Ints, Lengths, text, zipf_choice

SPREAD = 0.4  # shape of the lengths within a set of prompts
SCALE = 1.6  # a seed draws its sizes and its rate up to this factor larger or smaller


class Client:
    """Sends one request after the other, at `rate` a second on average."""

    def __init__(self, rng: np.random.Generator, rate: float, tick_s: float, question: int, output: int) -> None:
        self.rng = rng
        self.clock_s = 0.0
        self._rate = rate * self.scale()
        self._tick_s = tick_s
        self._question, self._output = Lengths(max(question, 1), SPREAD), Lengths(output, SPREAD)
        self._asks = question > 0

    def scale(self) -> float:
        """A factor around 1, another one for every seed."""
        return float(SCALE ** self.rng.uniform(-1.0, 1.0))

    def prompts(self, count: int, tokens: float) -> list[Tokens]:
        """A new set of `count` prompts of about `tokens` tokens."""
        lengths = Lengths(tokens * self.scale(), SPREAD, 48).draw(self.rng, count)
        return [text(self.rng, int(n)) for n in lengths]

    def ask(self, prompt: Tokens, name: str, at_once: bool = False) -> TraceRequest:
        """The next request; `at_once`: no time has passed since the last."""
        rng = self.rng
        if not at_once:
            self.clock_s += float(rng.exponential(1.0 / self._rate))
        ts = self.clock_s // self._tick_s * self._tick_s if self._tick_s else self.clock_s
        question = [text(rng, int(self._question.draw(rng, 1)[0]))] if self._asks else []
        tokens = np.concatenate([prompt, *question, text(rng, int(self._output.draw(rng, 1)[0]))])
        tokens.flags.writeable = False
        return TraceRequest(tokens, len(prompt) + sum(map(len, question)), ts, name)

    def ask_each(self, prompts: list[Tokens], order: Ints, name: str) -> Iterator[TraceRequest]:
        """One request for each entry of `order`, an index of `prompts`."""
        for i in order.tolist():
            yield self.ask(prompts[i], f"{name} {i}")


def hotcold(
    rng: np.random.Generator, cold: int = 40, cold_tokens: int = 1500, cold_uses: int = 2, hot: int = 5,
    hot_tokens: int = 200, requests: int = 800, cycles: int = 2, rate: float = 4.0, tick_s: float = 0.0,
    question_tokens: int = 30, output_tokens: int = 30,
) -> Iterator[TraceRequest]:  # fmt: skip
    """Long prompts, each of them `cold_uses` times, then a few short ones for a long time."""
    client = Client(rng, rate, tick_s, question_tokens, output_tokens)
    for cycle in range(cycles):
        large, small = client.prompts(cold, cold_tokens), client.prompts(hot, hot_tokens)
        yield from client.ask_each(large, np.tile(np.arange(cold), cold_uses), f"cold {cycle}")
        yield from client.ask_each(small, np.arange(requests) % hot, f"hot {cycle}")


def flips(
    rng: np.random.Generator, items: int = 60, tokens: int = 1200, exponent: float = 1.2, requests: int = 250,
    times: int = 5, rate: float = 4.0, tick_s: float = 0.0, question_tokens: int = 30, output_tokens: int = 30,
) -> Iterator[TraceRequest]:  # fmt: skip
    """One set of prompts by a popularity that is turned upside down every `requests`."""
    client = Client(rng, rate, tick_s, question_tokens, output_tokens)
    prompts = client.prompts(items, tokens)
    order = rng.permutation(items)
    for _ in range(times):
        yield from client.ask_each(prompts, order[zipf_choice(rng, items, exponent, requests)], "item")
        order = order[::-1]


def scans(
    rng: np.random.Generator, hot: int = 10, hot_tokens: int = 800, scan: int = 40, scan_tokens: int = 3000,
    visits: int = 1, every: int = 120, times: int = 8, rate: float = 4.0, tick_s: float = 0.0,
    question_tokens: int = 30, output_tokens: int = 30,
) -> Iterator[TraceRequest]:  # fmt: skip
    """A working set, and every so often a sweep over long documents that are never asked for again."""
    client = Client(rng, rate, tick_s, question_tokens, output_tokens)
    prompts = client.prompts(hot, hot_tokens)
    for sweep in range(times):
        yield from client.ask_each(prompts, rng.integers(0, hot, every), "hot")
        yield from client.ask_each(client.prompts(scan, scan_tokens), np.repeat(np.arange(scan), visits), f"{sweep}")


def loops(
    rng: np.random.Generator, items: int = 24, tokens: int = 1500, rounds: int = 25, turns: int = 2,
    rate: float = 4.0, tick_s: float = 0.0, question_tokens: int = 30, output_tokens: int = 30,
) -> Iterator[TraceRequest]:  # fmt: skip
    """A set of prompts asked in the same order again and again, `turns` times another set."""
    client = Client(rng, rate, tick_s, question_tokens, output_tokens)
    for turn in range(turns):
        yield from client.ask_each(
            client.prompts(items, tokens), np.tile(rng.permutation(items), rounds), f"loop {turn}"
        )


def alternating(
    rng: np.random.Generator, small: int = 30, small_tokens: int = 500, large: int = 8, large_tokens: int = 4000,
    requests: int = 150, times: int = 8, rate: float = 4.0, tick_s: float = 0.0, question_tokens: int = 30,
    output_tokens: int = 30,
) -> Iterator[TraceRequest]:  # fmt: skip
    """Two sets of prompts that take turns, a period of `requests` each."""
    client = Client(rng, rate, tick_s, question_tokens, output_tokens)
    sets = [client.prompts(small, small_tokens), client.prompts(large, large_tokens)]
    for period in range(times):
        held = sets[period % 2]
        yield from client.ask_each(held, rng.integers(0, len(held), requests), f"set {period % 2}")


def drifts(
    rng: np.random.Generator, width: int = 12, tokens: int = 1200, requests: int = 1200, every: int = 20,
    rate: float = 4.0, tick_s: float = 0.0, question_tokens: int = 30, output_tokens: int = 30,
) -> Iterator[TraceRequest]:  # fmt: skip
    """A window of `width` prompts that moves on by one every `every` requests; what it left never comes back."""
    client = Client(rng, rate, tick_s, question_tokens, output_tokens)
    prompts = client.prompts(requests // every + width, tokens)
    order = np.arange(requests) // every + rng.integers(0, width, requests)
    yield from client.ask_each(prompts, order, "item")


def bursts(
    rng: np.random.Generator, count: int = 120, group: int = 8, tokens: int = 1200, lasting: int = 6,
    lasting_tokens: int = 400, rate: float = 1.0, tick_s: float = 0.0, question_tokens: int = 30,
    output_tokens: int = 30,
) -> Iterator[TraceRequest]:  # fmt: skip
    """Bursts of `group` requests at one stamp for a prompt that is new, between requests for a few that last."""
    client = Client(rng, rate, tick_s, question_tokens, output_tokens)
    held = client.prompts(lasting, lasting_tokens)
    for burst in range(count):
        prompt = client.prompts(1, tokens)[0]
        for i in range(group):
            yield client.ask(prompt, f"burst {burst}", at_once=i > 0)
        yield from client.ask_each(held, rng.permutation(lasting), "lasting")


def shifting(
    rng: np.random.Generator, phases: int = 5, requests: int = 250, rate: float = 2.0, tick_s: float = 0.0,
    question_tokens: int = 30, output_tokens: int = 30,
) -> Iterator[TraceRequest]:  # fmt: skip
    """Phases of any kind after each other: number and size of the prompts, their order and pace are drawn for each.

    A third of the phases go on with a set of an earlier one.
    """
    client = Client(rng, rate, tick_s, question_tokens, output_tokens)
    sets: list[list[Tokens]] = []
    for phase in range(phases):
        client._rate = rate * float(np.exp(rng.uniform(-2.0, 2.0)))
        if not sets or rng.random() > 1 / 3:
            items, tokens = np.exp(rng.uniform(np.log((3, 100)), np.log((80, 6000))))
            sets.append(client.prompts(int(items), float(tokens)))
        held = sets[int(rng.integers(len(sets)))]
        order = ORDERS[int(rng.integers(len(ORDERS)))]
        yield from client.ask_each(held, order(rng, len(held), requests), f"phase {phase}")


def _in_turn(rng: np.random.Generator, items: int, n: int) -> Ints:
    return np.arange(n) % items


def _twice(rng: np.random.Generator, items: int, n: int) -> Ints:
    return np.arange(n) // 2 % items


def _popular(rng: np.random.Generator, items: int, n: int) -> Ints:
    return rng.permutation(items)[zipf_choice(rng, items, 1.2, n)]


def _any(rng: np.random.Generator, items: int, n: int) -> Ints:
    return rng.integers(0, items, n)


def _window(rng: np.random.Generator, items: int, n: int) -> Ints:
    width = max(items // 4, 1)
    return (np.arange(n) * items // n + rng.integers(0, width, n)) % items


ORDERS: tuple[Callable[[np.random.Generator, int, int], Ints], ...] = (_in_turn, _twice, _popular, _any, _window)
KINDS = (hotcold, flips, scans, loops, alternating, drifts, bursts, shifting)
