"""Settings of a server that a production would give, and combinations of them drawn at random."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

from benchmarks.serving.soak import ENVIRONMENT

Choice = tuple[str, ...]
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "3", "--hicache-write-policy")
SETTINGS: dict[str, dict[str, Choice]] = {
    "strategy": {
        name: ("--mamba-radix-cache-strategy", name) for name in ("extra_buffer", "no_buffer", "extra_buffer_lazy")
    },
    "loop": {name: ("--hybrid-cpu-event-loop", name) for name in ("normal", "overlap")},
    "page": {n: ("--page-size", n) for n in ("1", "16", "64", "128")},
    "chunk": {n: ("--chunked-prefill-size", n) for n in ("512", "128", "192", "-1")},
    "memory": {"static": (), "elastic": ("--hybrid-memory", "elastic")},
    "host": {"none": (), **{p: (*HOST, p) for p in ("write_through", "write_back", "write_through_selective")}},
    "storage": {"none": (), "file": ("--hicache-storage-backend", "file")},
    "policy": {p: ("--hybrid-policy", p) for p in ("forecast", "recency", "lru", "marconi-online", "marconi:0.5")},
    "schedule": {p: ("--schedule-policy", p) for p in ("fcfs", "lpm", "dfs-weight", "lof", "random")},
    "mixed": {"off": (), "on": ("--enable-mixed-chunk",)},
    "ranks": {
        "1": (),
        "2": ("--tp-size", "2"),
        "attention": ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
    },
    "segments": {"off": (), "on": ("--hybrid-segments", "on", "--hybrid-segment-memory-gb", "0.05")},
    "drafts": {
        "none": (),
        "head": ("--speculative-algorithm", "NEXTN"),
        "n-grams": ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"),
    },
    "states": {n: ("--max-mamba-cache-size", n) for n in ("40", "24")},
    "tokens": {n: ("--max-total-tokens", n) for n in ("5000", "9000", "60000")},
    "running": {n: ("--max-running-requests", n) for n in ("6", "2")},
    "priority": {"off": (), "on": ("--enable-priority-scheduling",)},
    "admission": {"": (), "one": ("--prefill-max-requests", "1"), "bold": ("--schedule-conservativeness", "0.1")},
    "retraction": {"off": (), "forced": ("SGLANG_TEST_RETRACT=1",)},
    "tree": {"rust": (), "python": ("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python",)},
    "workers": {"1": (), "2": ("--tokenizer-worker-num", "2")},
    "log": {"none": (), "written": ("--hybrid-request-log", "REQUEST_LOG")},
    "events": {
        "none": (),
        "published": (
            "--hybrid-state-events", "published", "--kv-events-config", '{"publisher":"zmq","topic":"kv","endpoint":"tcp://*:PORT"}',
        ),
    },
    "sessions": {"off": (), "on": ("--enable-streaming-session",)},
    "interval": {"1": (), "4": ("--stream-interval", "4")},
}  # fmt: skip

REFUSED = (
    {"loop": "overlap", "strategy": "no_buffer"},
    {"memory": "elastic", "policy": "lru"},
    {"memory": "elastic", "mixed": "on"},
    {"memory": "elastic", "sessions": "on"},
    {"memory": "elastic", "strategy": "extra_buffer_lazy"},
    {"memory": "elastic", "ranks": "attention"},
    {"memory": "elastic", "preset": "conv"},
    {"segments": "on", "mixed": "on"},
    {"segments": "on", "ranks": "attention"},
    {"segments": "on", "preset": "conv"},
    {"log": "written", "ranks": "attention"},
    {"host": "none", "storage": "file"},
)
"""Settings that go together nowhere; what is refused for other reasons is reported, and not drawn again."""


def allowed(chosen: dict[str, str]) -> bool:
    """Whether a server could start with settings of which one has several values that exclude another."""
    preset, page = chosen["preset"], int(chosen["page"])
    return not (
        (chosen["host"] != "none" and chosen["memory"] == "elastic" and chosen["ranks"] != "1")
        or (chosen["host"] != "none" and chosen["segments"] == "on")
        or (chosen["drafts"] == "head" and preset != "mtp")
        or (chosen["drafts"] != "none" and (preset == "conv" or chosen["sessions"] == "on"))
        or (preset not in ("gdn", "mtp") and chosen["ranks"] == "attention")
        or (chosen["drafts"] == "n-grams" and page > 1)
        or (chosen["strategy"] != "no_buffer" and (preset == "conv" or chosen["mixed"] == "on"))
        or (chosen["strategy"] == "no_buffer" and page > 1)
        or (chosen["schedule"] not in ("fcfs", "lof") and chosen["priority"] == "on")
        or int(chosen["chunk"]) % page
    )


def pairs(chosen: dict[str, str]) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(sorted(chosen.items()), 2))


def drawn(rng: random.Random, preset: str, seen: set[tuple[Any, ...]], refused: list[dict[str, str]]) -> dict[str, str]:
    """The one of fifty candidates that shows most pairs that no server had; none that holds a refused combination."""
    best: tuple[int, dict[str, str]] = (-1, {})
    for _ in range(50):
        while True:
            chosen = {
                name: next(iter(values)) if rng.random() < 0.5 else rng.choice(list(values))
                for name, values in SETTINGS.items()
            } | {"preset": preset}
            if preset == "conv" or rng.random() < 0.2:
                chosen["strategy"] = "no_buffer"
            if allowed(chosen) and not any(each.items() <= chosen.items() for each in refused):
                break
        best = max(best, (len(pairs(chosen) - seen), chosen), key=lambda pair: pair[0])
    return best[1]


def blamed(said: str, chosen: dict[str, str]) -> dict[str, str]:
    """The settings whose flags a refusal names; all of them if it names none."""
    named = {
        name: chosen[name]
        for name, values in SETTINGS.items()
        if any(word in said for word in values[chosen[name]][:1])
    }
    return named or chosen


def command(chosen: dict[str, str], scratch: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a combination."""
    flags: list[str] = ["--enable-metrics"]
    environment = dict(ENVIRONMENT, SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=str(scratch / "storage"))
    if chosen["ranks"] != "1":
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    for name, values in SETTINGS.items():
        if chosen["memory"] == "elastic" and name in ("states", "tokens"):
            continue
        for word in values[chosen[name]]:
            if re.fullmatch(r"[A-Z_]+=\w+", word):
                variable, _, is_set = word.partition("=")
                environment[variable] = is_set
            else:
                flags.append(word.replace("REQUEST_LOG", str(scratch / "requests.log")).replace("PORT", str(port)))
    if chosen["memory"] == "elastic":
        flags += ["--hybrid-cpu-memory-gb", "0.02" if chosen["states"] == "40" else "0.012"]
    return flags, environment
