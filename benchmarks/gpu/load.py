"""What a server is asked: branching prompts, cold and hit, with log-probabilities; a load that fills its pools."""

from __future__ import annotations

import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.serving.servers import flush, streamed, words


@dataclass(frozen=True)
class Size:
    """How much is asked: conversations, turns, tokens of a shared system prompt, of a message, of an answer."""

    branching: int
    conversations: int
    turns: int
    system: int
    message: int
    answer: int
    at_once: int


FULL = Size(branching=48, conversations=96, turns=3, system=3072, message=256, answer=64, at_once=16)
REHEARSAL = Size(branching=6, conversations=6, turns=2, system=192, message=32, answer=6, at_once=3)


class Client:
    """One server's native endpoint, by token ids."""

    def __init__(self, url: str) -> None:
        self.url = url

    def flush(self) -> None:
        flush(self.url)

    def metrics(self) -> str:
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as response:
            return str(response.read().decode())

    def ask(self, prompt: Sequence[int], tokens: int, logprobs: bool = False) -> dict[str, Any]:
        """A greedy answer: seconds to its first and last token, its ids, tokens hit, log-probabilities if asked for."""
        first, total, last = streamed(self.url, list(prompt), tokens, 600, return_logprob=logprobs)
        meta = last["meta_info"]
        found = {"ttft_s": first, "total_s": total, "ids": last["output_ids"]}
        found |= {"prompt_tokens": len(prompt), "cached_tokens": meta["cached_tokens"]}
        if logprobs:
            found["logprobs"] = [value for value, *_ in meta["output_token_logprobs"]]
        return found


def branching(size: Size, seed: int) -> list[list[int]]:
    """Prompts that leave each other at odd places, in the order in which they are asked."""
    rng = random.Random(seed)
    made = [words(rng, size.system)]
    while len(made) < size.branching:
        base = rng.choice(made)
        made.append(base[: rng.randrange(len(base) // 2, len(base))] + words(rng, rng.randrange(5, size.message)))
    return made


def equality(client: Client, size: Size, seed: int = 1, tokens: int = 8) -> dict[str, Any]:
    """Log-probabilities of a hit beside those of a cold prefill, and the same between two batches of cold ones.

    Kernels round by the shape of the batch, so two cold answers differ as well: that is the yardstick of a hit.
    """
    prompts = branching(size, seed)
    client.flush()
    for prompt in prompts:
        client.ask(prompt, tokens)
    hits = [client.ask(prompt, tokens, logprobs=True) for prompt in prompts]
    cold = []
    for prompt in prompts:
        client.flush()
        cold.append(client.ask(prompt, tokens, logprobs=True))
    together = []
    for at in range(0, len(prompts), size.at_once):
        client.flush()
        with ThreadPoolExecutor(size.at_once) as pool:
            part = prompts[at : at + size.at_once]
            together += list(pool.map(lambda prompt: client.ask(prompt, tokens, logprobs=True), part))
    return {
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "hit_tokens": sum(answer["cached_tokens"] for answer in hits),
        "hit_beside_cold": distance(hits, cold),
        "cold_beside_cold_in_a_batch": distance(together, cold),
    }


def distance(some: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How far log-probabilities lie apart, up to the first token in which two answers differ."""
    gaps, differ = [], 0
    for one, other in zip(some, others, strict=True):
        differ += one["ids"] != other["ids"]
        for first, second, a, b in zip(one["ids"], other["ids"], one["logprobs"], other["logprobs"], strict=True):
            gaps.append(abs(a - b) if first == second else 0.0)
            if first != second:
                break
    return {"mean": statistics.fmean(gaps), "p95": quantile(gaps, 0.95), "max": max(gaps), "answers_differ": differ}


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def conversations(client: Client, size: Size, seed: int = 2) -> dict[str, Any]:
    """Conversations behind a few system prompts, many at once: hits, times to the first token, tokens per second."""
    rng = random.Random(seed)
    systems = [words(rng, size.system) for _ in range(4)]
    histories = [rng.choice(systems) + words(rng, size.message) for _ in range(size.conversations)]
    messages = [[words(rng, size.message) for _ in range(size.turns)] for _ in histories]
    client.flush()
    answers: list[dict[str, Any]] = []
    lock = threading.Lock()

    def turn(number: int, at: int) -> None:
        answer = client.ask(histories[at], size.answer)
        histories[at] = histories[at] + answer["ids"] + messages[at][number]
        with lock:
            answers.append({**answer, "turn": number})

    start = time.perf_counter()
    for number in range(size.turns):  # all conversations have their turn before one has the next: reuse is far apart
        with ThreadPoolExecutor(size.at_once) as pool:
            list(pool.map(partial(turn, number), range(len(histories))))
    seconds = time.perf_counter() - start
    times = [answer["ttft_s"] for answer in answers]
    later = [answer["ttft_s"] for answer in answers if answer["turn"]] or times
    return {
        "requests": len(answers),
        "hit_rate": sum(a["cached_tokens"] for a in answers) / sum(a["prompt_tokens"] for a in answers),
        "ttft_p50_s": quantile(times, 0.5),
        "ttft_p95_s": quantile(times, 0.95),
        "later_turns_ttft_p50_s": quantile(later, 0.5),
        "later_turns_ttft_p95_s": quantile(later, 0.95),
        "output_tokens_per_s": sum(len(a["ids"]) for a in answers) / seconds,
        "prompt_tokens_per_s": sum(a["prompt_tokens"] for a in answers) / seconds,
        "seconds": seconds,
    }


def decode(client: Client, size: Size, seed: int = 3) -> float:
    """Tokens per second of answers to short prompts, as many at once as the load has."""
    rng = random.Random(seed)
    prompts = [words(rng, 32) for _ in range(size.at_once)]
    start = time.perf_counter()
    with ThreadPoolExecutor(size.at_once) as pool:
        answers = list(pool.map(lambda prompt: client.ask(prompt, 4 * size.answer), prompts))
    return sum(len(answer["ids"]) for answer in answers) / (time.perf_counter() - start)
