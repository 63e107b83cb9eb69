"""Start-up, prefill, decode and second turns on the CPU platform: our launcher, stock SGLang, and the cache off.

    python -m benchmarks.serving.throughput [--repeats N] [--model gdn-medium]

Stock SGLang runs on the same CPU platform with the same sizes through `python -m sglang.launch_server`; the servers run
side by side and take turns request by request, so that a busy moment of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.servers import Client, hybrid, median_of, stock, words
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server

SERVERS = {"hybrid": hybrid(), "stock": stock(), "cache-off": hybrid("--disable-radix-cache")}
PREFILLS = (512, 2048, 4096)
TURNS, FIRST_TURN, NEXT_TURN, ANSWER = 4, 2000, 60, 40


def prefill(client: Client, rng: random.Random, length: int) -> dict[str, float]:
    answer = client.ask(words(rng, length), 1)
    assert answer["cached_tokens"] == 0
    return {"ttft_s": answer["ttft_s"], "tokens_per_s": length / answer["ttft_s"]}


def decode(client: Client, rng: random.Random, tokens: int = 192) -> dict[str, float]:
    answer = client.ask(words(rng, 64), tokens)
    return {"tokens_per_s": (tokens - 1) / (answer["total_s"] - answer["ttft_s"])}


def conversation(client: Client, rng: random.Random) -> list[dict[str, float]]:
    """A conversation of TURNS turns; one row per turn after the first."""
    history, rows = words(rng, FIRST_TURN), []
    for turn in range(TURNS):
        answer = client.ask(history, ANSWER)
        if turn:
            rows.append(
                {"ttft_s": answer["ttft_s"], "cached_tokens": answer["cached_tokens"], "prompt_tokens": len(history)}
            )
        history = history + answer["output_ids"] + words(rng, NEXT_TURN)
    return rows


def interleaved(
    clients: dict[str, Client], repeats: int, seed: int, measure: Callable[[Client, random.Random], Any]
) -> dict[str, list[Any]]:
    """Run `measure` `repeats` times on every server, in rotating order and with the same random prompts."""
    samples: dict[str, list[Any]] = {name: [] for name in clients}
    names = list(clients)
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            samples[name].append(measure(clients[name], random.Random(seed * 1000 + repeat)))
    return samples


def ratio(
    samples: dict[str, list[dict[str, float]]], key: str, of: str = "hybrid", to: str = "stock"
) -> dict[str, float]:
    """Of one server's `key` to the other's, over paired samples."""
    return median_of([a[key] / b[key] for a, b in zip(samples[of], samples[to], strict=True)])


def start(
    folder: Path, logs: Path, stack: ExitStack, repeats: int = 3
) -> tuple[dict[str, Client], dict[str, list[float]]]:
    """Start every server `repeats` times in turn; the last ones stay. Returns clients and start-up seconds."""
    clients: dict[str, Client] = {}
    seconds: dict[str, list[float]] = {name: [] for name in SERVERS}
    for repeat in range(repeats):
        for name, (launcher, flags, environment) in SERVERS.items():
            server = Server(folder, flags, log=logs / f"{name}.log", environment=environment, launcher=launcher)
            with ExitStack() as once:
                clients[name] = Client((stack if repeat == repeats - 1 else once).enter_context(server))
                seconds[name].append(server.wait_ready())
        print(
            f"start-up {repeat + 1}/{repeats}: { {name: round(s[-1], 1) for name, s in seconds.items()} }", flush=True
        )
    return clients, seconds


def summarise(result: dict[str, Any]) -> dict[str, Any]:
    """Medians per server and paired ratios of ours to stock."""
    summary: dict[str, Any] = {"startup_s": {n: statistics.median(v) for n, v in result["startup_s"].items()}}
    speeds = [*(f"prefill_{length}" for length in PREFILLS), "decode_1"]
    for name in speeds:
        samples = result[name]
        summary[name] = {n: statistics.median(s["tokens_per_s"] for s in v) for n, v in samples.items()}
        summary[name]["hybrid_to_stock"] = ratio(samples, "tokens_per_s")
    pooled = {n: [sample for name in speeds for sample in result[name][n]] for n in result["decode_1"]}
    summary["all_speeds_hybrid_to_stock"] = ratio(pooled, "tokens_per_s")
    turns = {n: [row for rows in v for row in rows] for n, v in result["turns"].items()}
    summary["later_turn_ttft_ms"] = {n: 1e3 * statistics.median(r["ttft_s"] for r in v) for n, v in turns.items()}
    summary["later_turn_ttft_ms"]["off_to_on"] = ratio(turns, "ttft_s", "cache-off", "hybrid")
    summary["later_turn_hit_rate"] = {
        n: sum(r["cached_tokens"] for r in v) / sum(r["prompt_tokens"] for r in v) for n, v in turns.items()
    }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--model", default="gdn", help=f"demo model: {', '.join(model.PRESETS)}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = model.build(Path(scratch) / options.model, options.model)
        clients, startup = start(folder, Path(scratch), stack)
        interleaved(clients, 3, 9, lambda c, r: prefill(c, r, 1024))  # first use of every code path
        result: dict[str, Any] = {"startup_s": startup}
        for length in PREFILLS:
            result[f"prefill_{length}"] = interleaved(
                clients, options.repeats, length, lambda c, r, length=length: prefill(c, r, length)
            )
        result["decode_1"] = interleaved(clients, 3 * options.repeats, 1, decode)  # scatters most
        result["turns"] = interleaved(clients, max(options.repeats // 3, 3), 2, conversation)
    settings = {"model": options.model, "repeats": options.repeats, "seed": "by repeat", "servers": list(SERVERS)}
    head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid")
    summary = summarise(result)
    print(json.dumps(summary, indent=1))
    print(
        provenance.write("serving", f"throughput-{options.model}", {**head, **settings, "summary": summary, **result})
    )


if __name__ == "__main__":
    main()
