"""What becomes of answers if cached states are kept in fewer bits: right answers by kind, row by row.

    python -m benchmarks.quality.states [--model reader-gdn] [--questions 200]

A conversation resumes from states at the end of its documents and at the end of every turn. There each recurrent state
is rounded as a cache of that type would keep it, and the pass goes on from it; KV and convolution windows stay exact.
`float32` is the exact cache, `none` the other end: states are forgotten, so that only attention remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import provenance
from benchmarks.quality import study
from benchmarks.quality.questions import Counts, rows
from benchmarks.quality.recurrences import replaced
from sglang_hybrid.demo.reader import evaluation, tokens, weights
from sglang_hybrid.demo.reader.conversations import Conversation
from sglang_hybrid.demo.reader.examples import encode
from sglang_hybrid.demo.reader.names import HELD
from sglang_hybrid.demo.reader.network.layers import Recurrence

LENGTHS = (512, 2048, 8192)


def integers(bits: int) -> Callable[[Tensor], Tensor]:
    """Rounding to signed integers of `bits` bits, with one scale per head and row of its state."""

    def rounded(state: Tensor) -> Tensor:
        top = 2 ** (bits - 1) - 1
        scale = state.abs().amax(-1, keepdim=True).clamp_min(1e-30) / top
        return (state / scale).round() * scale

    return rounded


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda state: state,
    "bfloat16": lambda state: state.bfloat16().float(),
    "float8_e4m3": lambda state: state.to(torch.float8_e4m3fn).float(),
    "int8": integers(8),
    "int4": integers(4),
    "none": torch.zeros_like,
}


def resuming(rounded: Callable[[Tensor], Tensor], cuts: list[int]) -> Callable[[Recurrence], Recurrence]:
    """A rule that goes on from `rounded` states at positions `cuts`."""

    def other(rule: Recurrence) -> Recurrence:
        def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            ends = [*cuts, inputs[0].shape[2]]
            made, state = [], None
            for start, end in zip([0, *cuts], ends, strict=True):
                out, state = rule(*(x[:, :, start:end] for x in inputs), state=state)
                made.append(out)
                state = rounded(state) if end != ends[-1] else state
            return torch.cat(made, 2), state

        return run

    return other


def ends(ids: list[int]) -> list[int]:
    """Where a conversation can be resumed: behind each message."""
    return [at + 1 for at, token in enumerate(ids[:-1]) if token == tokens.special_id(tokens.END)]


def score(network: Any, conversations: Iterable[Conversation], rounded: Callable[[Tensor], Tensor]) -> Counts:
    def resumed() -> Iterator[Conversation]:
        """Each conversation, with a network that resumes where this one does while it is judged."""
        for conversation in conversations:
            with replaced(network, resuming(rounded, ends(encode(conversation).ids))):
                yield conversation

    return evaluation.score(network, resumed())


def main() -> None:
    parser = study.parser(__doc__)
    parser.add_argument("--questions", type=int, default=200, help="of each kind at least, in each row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = provenance.head("torch", "tokenizers", "sglang-hybrid")
    network = weights.network(options.model)
    made = []
    for length in LENGTHS:
        for name, rounded in ROUNDED.items():
            counts = score(network, evaluation.drawn(length, HELD, options.questions), rounded)
            made.append({"length": length, "states": name, "rows": rows(counts)})
            print(length, name, {row["kind"]: row["share"] for row in made[-1]["rows"]}, flush=True)
    study.write("states", options.model, head, cells=made)


if __name__ == "__main__":
    main()
