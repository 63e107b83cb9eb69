"""What a prefix cache serves of prompts it has seen: cached tokens by scenario, of SGLang's and of ours.

    python -m benchmarks.serving.reuse [--preset gdn | kda | mamba2 | conv]

Stock SGLang by strategy and tree core, and ours, on the CPU platform; every cell is a count of tokens, not a time. The
column `seen` is the ceiling: how many tokens of the prompt (less the last one, which is always computed) the server had
processed before.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.servers import Client, Command, hybrid, stock, words
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server

ANSWER = 24


def columns(preset: str) -> dict[str, Command]:
    """Servers by the name of their column. LFM2 (`conv`) has no extra buffer."""
    made: dict[str, Command] = {}
    for strategy in ("no_buffer",) if preset == "conv" else ("no_buffer", "extra_buffer"):
        made |= {f"{strategy}, {core} core": stock(strategy, core) for core in ("rust", "python")}
        made[f"{strategy}, ours"] = hybrid("--mamba-radix-cache-strategy", strategy)
    return made


def scenarios(client: Client) -> Iterator[dict[str, Any]]:
    """Ask each scenario's prompts in order on an empty cache; yields the last request of each."""
    rng = random.Random(7)
    base = words(rng, 700)

    def ask(prompt: list[int], seen: int, name: str) -> dict[str, Any]:
        answer = client.ask(prompt, ANSWER)
        row = {"scenario": name, "prompt_tokens": len(prompt), "seen": seen, "cached_tokens": answer["cached_tokens"]}
        row["output_ids"] = answer["output_ids"]
        return row

    yield ask(base, 0, "a new prompt of 700")
    yield ask(base, 699, "the same prompt again")
    yield ask(base + words(rng, 50), 700, "the prompt and 50 more")
    yield ask(base[:400] + words(rng, 100), 400, "its first 400 and 100 others: 2nd sighting")
    yield ask(base[:400] + words(rng, 90), 400, "its first 400 and 90 others: 3rd sighting")
    history = words(rng, 300)
    for turn in range(4):
        known = 0 if turn == 0 else len(history) - 30 - 1
        row = ask(history, known, f"a conversation, turn {turn + 1}")
        history = history + row["output_ids"] + words(rng, 30)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gdn", help=f"demo model: {', '.join(model.PRESETS)}")
    options = parser.parse_args()
    table: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.build(Path(scratch) / options.preset, options.preset)
        for column, (launcher, flags, environment) in columns(options.preset).items():
            log = Path(scratch) / f"{column}.log"
            with Server(folder, flags, log=log, environment=environment, launcher=launcher) as server:
                server.wait_ready()
                for row in scenarios(Client(server)):
                    row.pop("output_ids")
                    cell = table.setdefault(row["scenario"], {k: row[k] for k in ("prompt_tokens", "seen")})
                    cell[column] = row["cached_tokens"]
    for name, cell in table.items():
        print(f"{name:<48}", "  ".join(f"{key} {value}" for key, value in cell.items()))
    head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid")
    print(
        provenance.write(
            "serving", f"reuse-{options.preset}", {**head, "model": options.preset, "seed": 7, "rows": table}
        )
    )


if __name__ == "__main__":
    main()
