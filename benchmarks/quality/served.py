"""Whether a server with the cache on answers as the model alone does: right answers by kind, and token for token.

    python -m benchmarks.quality.served [--model reader-gdn] [--questions 40] [--lengths 512,2048,8192]

The same held-out conversations, turn by turn, are asked of a server without a cache and of one with it, for both
strategies, with static and with elastic memory. `ties`: answers that differ where two tokens are closer than 2e-4 in a
logit; `wrong`: those that differ anywhere else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.quality import study
from benchmarks.quality.questions import Question, asked, counted, rows
from benchmarks.serving.equality import judged
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import Server
from tests.engine.support import Client, Reference

RUNNING = ("--max-running-requests", "4")
SIZES = {"static": ("--max-total-tokens", "65536"), "elastic": ("--hybrid-cpu-memory-gb", "0.1")}
VARIANTS: dict[str, tuple[str, ...]] = {
    "cache off": ("--disable-radix-cache", *SIZES["static"]),
    **{
        f"{strategy}, {memory}": ("--mamba-radix-cache-strategy", strategy, "--hybrid-memory", memory, *sizes)
        for strategy in ("no_buffer", "extra_buffer")
        for memory, sizes in SIZES.items()
    },
}


def ask(client: Client, questions: Sequence[Question]) -> list[tuple[list[int], int]]:
    """Answers as long as the right ones, and the tokens of each prompt that came from the cache."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda question: client.generate(question.prompt, len(question.answer)), questions))


def main() -> None:
    parser = study.parser(__doc__)
    parser.add_argument("--questions", type=int, default=40, help="of each kind at least, at each length")
    parser.add_argument("--lengths", default="512,2048,8192")
    options = parser.parse_args()
    head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid")
    sets = {int(length): asked(int(length), options.questions) for length in options.lengths.split(",")}
    alone: dict[int, list[Any]] = {}
    made = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.build(Path(scratch) / options.model, options.model)
        reference = Reference(folder)
        for name, flags in VARIANTS.items():
            with Server(folder, (*RUNNING, *flags), log=Path(scratch) / "server.log") as server:
                server.wait_ready()
                for length, questions in sets.items():
                    answers = ask(Client(server), questions)
                    alone.setdefault(length, answers)
                    counts = counted(questions, (ids for ids, _ in answers))
                    same = judged([q.prompt for q in questions], answers, alone[length], reference)
                    made.append({"server": name, "length": length, **same, "rows": rows(counts)})
                    print(name, length, same, {row["kind"]: row["share"] for row in made[-1]["rows"]}, flush=True)
    study.write("served", options.model, head, cells=made)


if __name__ == "__main__":
    main()
