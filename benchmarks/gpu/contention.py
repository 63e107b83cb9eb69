"""Agents that contend for states, asked of one server; a model of the size that this is for; what is possible.

    python -m benchmarks.gpu.contention FOLDER [--layers 20]     # writes a model: configuration and tokenizer
    python -m benchmarks.gpu.contention FOLDER --result FILE     # adds the simulator's hit rates to servers.json

Sessions begin with one of a few long texts and append to their context turn by turn, with pauses that do not depend on
the server; more of them are open than the pool of states is good for. Every server gets the same prompts, but for its
own answers, and the same pauses. Other sessions come first and are not counted: on a card Triton compiled kernels
during the first three seconds of the first server, it seems for lengths that 16 does not divide.

`simulated`: hit rates for the turns in the order in which they were asked, one after the other, with the states that a
server's cache has; `endless` forgets nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.load import Client, quantile
from benchmarks.serving.servers import words
from sglang_hybrid.core.spec import from_config
from sglang_hybrid.demo.tokenizer import save_tokenizer
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.shape import Shape as Pools

STATES, KV_TOKENS, RUNNING = 64, 600_000, 16
HELD = 16
"""States that requests under way have themselves: three each, some five at a time."""


@dataclass(frozen=True)
class Shape:
    """`texts` have so many tokens; `opened` of the `sessions` are open at once; lows and highs are of tokens.

    `alone`: fresh prompts that are asked one at a time, and their tokens.
    """

    texts: tuple[int, ...] = (3000, 6000, 9000)
    sessions: int = 40
    opened: int = 24
    turns: tuple[int, int] = (6, 12)
    task: tuple[int, int] = (200, 800)
    added: tuple[int, int] = (100, 1200)
    answer: int = 32
    pause_s: float = 2.0
    alone: tuple[int, int] = (8, 16384)
    seed: int = 5


FULL = Shape()
REHEARSAL = Shape((120, 200), 4, 3, (2, 3), (10, 20), (10, 40), 4, 0.1, (2, 128))


class Session:
    """What one agent asks: `prompt`, then what `answered` makes of it."""

    def __init__(self, shape: Shape, number: int, texts: Sequence[list[int]]) -> None:
        self.number, self._shape, self._rng = number, shape, random.Random(f"{shape.seed} session {number}")
        self.prompt = self._rng.choice(texts) + words(self._rng, self._rng.randint(*shape.task))
        self.turns = self._rng.randint(*shape.turns)
        self.pauses = [self._rng.expovariate(1 / shape.pause_s) for _ in range(self.turns)]

    def answered(self, ids: list[int]) -> None:
        self.prompt = self.prompt + ids + words(self._rng, self._rng.randint(*self._shape.added))


def sessions(shape: Shape) -> list[Session]:
    texts = [words(random.Random(f"{shape.seed} text {length}"), length) for length in shape.texts]
    return [Session(shape, number, texts) for number in range(shape.sessions)]


def ask(client: Client, shape: Shape) -> dict[str, Any]:
    """Prompts alone, then all sessions: hits, tokens computed, seconds to the first token; a row for each request."""
    rng = random.Random(shape.seed)
    hold(
        client, replace(shape, seed=shape.seed + 1, sessions=shape.opened // 2, turns=(2, 2), pause_s=shape.pause_s / 8)
    )
    client.flush()
    alone = [client.ask(words(rng, shape.alone[1]), 1)["ttft_s"] for _ in range(shape.alone[0] + 1)][1:]
    begin = time.perf_counter()
    rows = hold(client, shape)
    columns = ("session", "turn", "start_s", "prompt_tokens", "cached_tokens", "ttft_s")
    return {
        "shape": asdict(shape),
        "alone_ttft_p50_s": statistics.median(alone),
        "alone_tokens_per_s": shape.alone[1] / statistics.median(alone),
        "seconds": time.perf_counter() - begin,
        **summary(rows),
        "later_turns": summary([row for row in rows if row["turn"]]),
        "columns": columns,
        "rows": [[round(row[column], 5) for column in columns] for row in rows],
    }


def hold(client: Client, shape: Shape) -> list[dict[str, Any]]:
    """Hold all sessions on an empty cache; a row for each request, in the order in which they were asked."""
    waiting, rows, lock = sessions(shape), list[dict[str, Any]](), threading.Lock()
    client.flush()
    begin = time.perf_counter()

    def work(_: int) -> None:
        while True:
            with lock:
                if not waiting:
                    return
                session = waiting.pop(0)
            for turn, pause in enumerate(session.pauses):
                time.sleep(pause)
                start = time.perf_counter() - begin
                answer = client.ask(session.prompt, shape.answer)
                with lock:
                    rows.append({"session": session.number, "turn": turn, "start_s": start, **answer})
                session.answered(answer["ids"])

    with ThreadPoolExecutor(shape.opened) as pool:
        list(pool.map(work, range(shape.opened)))
    return sorted(rows, key=lambda row: float(row["start_s"]))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    times, computed = [row["ttft_s"] for row in rows], [row["prompt_tokens"] - row["cached_tokens"] for row in rows]
    return {
        "requests": len(rows),
        "hit_rate": 1 - sum(computed) / sum(row["prompt_tokens"] for row in rows),
        "computed_p95": quantile(computed, 0.95),
        **{f"ttft_p{q}_s": quantile(times, q / 100) for q in (50, 95, 99)},
    }


def simulated(model: Path, found: dict[str, Any]) -> dict[str, float]:
    """Hit rates for the requests of `found`, what `ask` gave; answers are drawn, which decides nothing."""
    shape = Shape(**{name: tuple(of) if isinstance(of, list) else of for name, of in found["shape"].items()})
    spec, rates = from_config(model, kv_dtype="bfloat16"), {}
    free = STATES - HELD
    arms = {"forecast": ("forecast", free), "lru": ("lru", free), "endless": ("forecast", 100 * STATES)}
    for name, (policy, room) in arms.items():
        server, every, rng = SimulatedServer(spec, Pools(room, KV_TOKENS), policy), sessions(shape), random.Random(0)
        hits = asked = 0
        for number, _, now, *_ in found["rows"]:
            prompt, answer = every[number].prompt, words(rng, shape.answer)
            hits += server.lookup(np.array(prompt, np.int32), now)
            server.commit(np.array(prompt + answer, np.int32), len(prompt), now)
            asked += len(prompt)
            every[number].answered(answer)
        rates[name] = hits / asked
    return rates


def write(folder: Path, layers: int = 40) -> None:
    """The text model of Qwen3.5-35B-A3B by its shape, on the code path of Qwen3-Next: 68.5 GB in bfloat16."""
    config = {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "dtype": "bfloat16",
        "hidden_size": 2048, "num_hidden_layers": layers, "full_attention_interval": 4,
        "layer_types": ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(layers)],
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512, "intermediate_size": 5120, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000_000,
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "rope_scaling": None, "tie_word_embeddings": False, "use_cache": True,
        "max_position_embeddings": 262_144, "vocab_size": 151_936, "bos_token_id": 0, "eos_token_id": 2,
        "pad_token_id": 0,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--result", type=Path, help="servers.json of benchmarks.gpu.servers, changed in place")
    parser.add_argument("--layers", type=int, default=40, help="fewer, so that two servers fit on a card: 20")
    options = parser.parse_args()
    if not options.result:
        write(options.folder, options.layers)
        return
    result = json.loads(options.result.read_text())
    for name, of in result["servers"].items():
        if found := of.get("contention"):
            found["simulated"] = simulated(options.folder, found)
            print(name, found["hit_rate"], found["simulated"], flush=True)
    options.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
