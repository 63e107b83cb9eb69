"""How many heads forget, within a segment, all that was before it: their transitions vanish, and take no memory.

    python -m benchmarks.quality.transitions

Documents of the reader's language, each run by itself, of about so many tokens. For each recurrent layer: the share of
heads of which some element of T is larger than each bound, over all documents. Servers keep what is above 1e-6. The
reader of Mamba-2 has no row: its T is a number, of which nothing is saved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import provenance
from benchmarks.quality import study
from benchmarks.quality.recurrences import replaced
from benchmarks.quality.segments import SEED, drawn
from sglang_hybrid.demo.reader.network.layers import Recurrence
from sglang_hybrid_kernels.chunk_transition import chunk_transition
from tests.engine.composition import Composition

MODEL = "reader-gdn"
FACTS, DOCUMENTS = (5, 10, 20, 40, 80), 24
"""Facts of a document; five take some 120 tokens."""
BOUNDS = (1e-6, 1e-4, 1e-2)


def largest(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The largest element of each head's T, [heads], of tokens [1, heads, tokens, ...]."""
    k, v, g, beta = (x[0].transpose(0, 1).contiguous() for x in (k, v, g, beta))
    heads, size = k.shape[1:]
    transition, end_state = torch.empty(1, heads, size, size), torch.empty(1, heads, v.shape[-1], size)
    bounds = torch.tensor([0, len(k)])
    chunk_transition(k, v, g, beta, bounds, torch.zeros(1, dtype=torch.int64), end_state, transition)
    return transition[0].abs().amax((1, 2))


def cells() -> Iterator[dict[str, Any]]:
    judge = Composition(MODEL)
    for facts in FACTS:
        rng = random.Random(f"{SEED} {facts}")
        found: list[Tensor] = []

        def watching(rule: Recurrence, found: list[Tensor] = found) -> Recurrence:
            def run(*inputs: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
                found.append(largest(*inputs[1:5]))
                return rule(*inputs, **named)

            return run

        tokens = []
        with replaced(judge.network, watching):
            for _ in range(DOCUMENTS // 2):
                encoded, ranges = drawn(rng, 2, facts)
                for each in ranges:
                    judge.isolated(encoded.ids, [each])
                    tokens.append(each[1] - each[0])
        layers = len(found) // len(tokens)
        by_layer = torch.stack(found).unflatten(0, (-1, layers))
        above = {bound: (by_layer > bound).float().mean((0, 2)).tolist() for bound in BOUNDS}
        yield {
            "tokens": round(sum(tokens) / len(tokens)), "shortest": min(tokens), "longest": max(tokens),
            "documents": len(tokens), "heads": by_layer.shape[-1],
            **{f"above_{bound:g}": [round(x, 4) for x in shares] for bound, shares in above.items()},
        }  # fmt: skip


def main() -> None:
    study.parser(__doc__).parse_args(["--model", MODEL])
    torch.set_num_threads(1)
    head, rows = provenance.head("torch", "tokenizers", "sglang-hybrid"), list[dict[str, Any]]()
    for row in cells():
        rows.append(row)
        print(row, flush=True)
    study.write("transitions", MODEL, head, SEED, rows=rows)


if __name__ == "__main__":
    main()
