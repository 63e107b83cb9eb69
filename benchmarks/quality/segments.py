"""What answers lose over reused segments: right answers and Kullback-Leibler divergence, by how prompts are composed.

    python -m benchmarks.quality.segments [--model reader-gdn] [--conversations 60]

Documents stand in a tool message, each a segment; questions and answers follow. Rows: `full`, the prompt computed as a
whole, which is what the prefix cache gives; `seams N`, composed with N tokens of seams at each end (a server's default
is 8); `addition`, 8 tokens of seams and states of interiors added up, for comparison; `context`, 8 tokens of seams and
segments computed behind what stands in front of the first document, not by themselves. Names and forms of sentences are
held out; an answer counts if every token of it is right; `kl` is of the tokens of answers, from `full`, in nats.

Composed prefill is that of `tests/engine/composition.py`, which answers of servers equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import provenance
from benchmarks.quality import study
from benchmarks.quality.recurrences import replaced
from sglang_hybrid.demo.reader import conversations, evaluation, tokens
from sglang_hybrid.demo.reader.documents import Shape
from sglang_hybrid.demo.reader.examples import Encoded, encode
from sglang_hybrid.demo.reader.names import HELD
from sglang_hybrid.demo.reader.network.layers import Recurrence
from sglang_hybrid.segment.geometry import Range
from tests.engine.composition import Composition

SHAPES = ((2, 5), (4, 5), (8, 5), (16, 5), (2, 20))
"""Documents, and facts of each; five facts take some 120 tokens."""
TURNS, FILLER, SEED, SERVED = 8, 0.7, 20_261_125, 8
WIDTHS = (0, 4, 8, 16)
ADDITION, CONTEXT = "addition", "context"


def drawn(rng: random.Random, documents: int, facts: int) -> tuple[Encoded, list[Range]]:
    """A conversation, and where its documents lie in it."""
    made = conversations.draw(rng, Shape(documents, (facts, facts), FILLER, HELD, HELD), TURNS, mix=evaluation.EVEN)
    made.place, made.separated = conversations.TOOL_FIRST, True
    encoded = encode(made)
    starts = [at for at, token in enumerate(encoded.ids) if token == tokens.special_id(tokens.DOCUMENT)]
    end = encoded.ids.index(tokens.special_id(tokens.END), starts[-1])
    return encoded, list(zip(starts, [*starts[1:], end], strict=True))


def adding(interiors: Sequence[Range]) -> Callable[[Recurrence], Recurrence]:
    """A rule that adds up what interiors leave behind, and passes no state through them."""

    def other(rule: Recurrence) -> Recurrence:
        def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            made, state, at = [], None, 0
            for low, high in [*interiors, (inputs[0].shape[2],) * 2]:
                if at < low:
                    rest, state = rule(*(x[:, :, at:low] for x in inputs), state=state)
                    made.append(rest)
                if low < high:
                    inside, left = rule(*(x[:, :, low:high] for x in inputs))
                    made.append(inside)
                    state = left if state is None else state + left
                at = high
            return torch.cat(made, 2), state

        return run

    return other


def cells(model: str, documents: int, facts: int, count: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(f"{SEED} {documents} {facts}")
    made = [drawn(rng, documents, facts) for _ in range(count)]
    size = round(sum(high - low for _, ranges in made for low, high in ranges) / (count * documents))
    exact: list[Tensor] = []
    for name in ("full", *(f"seams {width}" for width in WIDTHS), ADDITION, CONTEXT):
        judge = Composition(model, int(name.split()[1]) if name.startswith("seams") else SERVED)
        counts: dict[str, list[int]] = {}
        divergences: list[float] = []
        for number, (encoded, ranges) in enumerate(made):
            first = encoded.answers[0][1]
            reused = [] if name == "full" else [each for each in ranges if each[1] - each[0] >= judge.seams.least]
            found = _logprobs(judge, encoded.ids, first, reused, name)
            if name == "full":
                exact.append(found)
            for turn, start, end in encoded.answers:
                part = slice(start - first, end - first)
                right = bool((found[part].argmax(-1) == torch.tensor(encoded.ids[start:end])).all())
                row = counts.setdefault(turn.kind, [0, 0])
                row[0], row[1] = row[0] + right, row[1] + 1
                whole = exact[number][part]
                divergences += (whole.exp() * (whole - found[part])).sum(-1).tolist()
        right, asked = (sum(row[at] for row in counts.values()) for at in (0, 1))
        low, high = evaluation.interval(right, asked)
        yield {
            "documents": documents, "tokens": size, "composition": name, "right": right, "questions": asked,
            "share": round(right / asked, 4), "interval": [round(low, 4), round(high, 4)],
            "kl": round(sum(divergences) / len(divergences), 6), "kinds": counts,
        }  # fmt: skip


def _logprobs(judge: Composition, ids: list[int], first: int, reused: list[Range], composed: str) -> Tensor:
    """Log-probabilities of the tokens from `first` on, [n, vocabulary]."""
    if composed == CONTEXT and reused:
        return judge.distributions(ids[:first], ids[first:], reused, judge.isolated(ids, reused, reused[0][0]))
    if composed != ADDITION:
        return judge.distributions(ids[:first], ids[first:], reused)
    taken = judge.isolated(ids, reused)
    with replaced(judge.network, adding([judge.seams.interior(each) for each in reused])):
        return judge.distributions(ids[:first], ids[first:], reused, taken)


def main() -> None:
    parser = study.parser(__doc__)
    parser.add_argument("--conversations", type=int, default=60, help="of each shape")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head, rows = provenance.head("torch", "tokenizers", "sglang-hybrid"), list[dict[str, Any]]()
    for documents, facts in SHAPES:
        for row in cells(options.model, documents, facts, options.conversations):
            rows.append(row)
            print({name: value for name, value in row.items() if name != "kinds"}, flush=True)
    study.write("segments", options.model, head, SEED, rows=rows)


if __name__ == "__main__":
    main()
