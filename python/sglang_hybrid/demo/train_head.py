"""Train the head that drafts for the published `reader-gdn`: `python -m sglang_hybrid.demo.train_head --out DIR`.

Its weights, rounded to bfloat16, come into DIR with what they achieve; `--publish` writes both into the package.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError

Text = tuple[list[int], list[tuple[int, int]]]

LENGTHS = (512, 2048)
"""Tokens of the conversations that a head is judged by."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_hybrid.demo.train_head", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of weights and figures")
    parser.add_argument("--steps", type=int, default=400, help="of 2,048 tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=24, help="to judge it by, of each length")
    parser.add_argument("--publish", action="store_true", help="write weights and card into the package")
    options = parser.parse_args(argv)
    try:
        if min(options.steps, options.conversations) < 1:
            raise ConfigError(f"--steps and --conversations must be at least 1: {options.steps}")
        _train(options)
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        return 130
    return 0


def _train(options: argparse.Namespace) -> None:
    from sglang_hybrid.demo.evaluate import head as here
    from sglang_hybrid.demo.reader import card, drafting, weights
    from sglang_hybrid.demo.reader.network.head import PREFIX

    def say(line: str) -> None:
        print(line, flush=True)  # noqa: T201

    model = drafting.MODEL
    reader, content, commit = weights.network(model), weights.card(model), here()["commit"]
    begun = time.monotonic()
    trained, seen = drafting.train(reader, options.steps, options.seed, say)
    seconds = time.monotonic() - begun
    file = weights.head_path(model) if options.publish else options.out / weights.head_path(model).name
    weights.write({PREFIX + name: weight for name, weight in trained.state_dict().items()}, file)
    trained = drafting.load(file)
    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        name, found = f"{length:,} tokens", drafting.accepted(reader, trained, held_out(length, options.conversations))
        shares = [round(share, 4) for share in found.shares]
        rows.append({"text": name, "places": found.places, "shares": shares, "length": round(found.length, 3)})
        say(f"{name}: {', '.join(f'{share:.1%}' for share in shares)} right, {found.length:.2f} tokens a pass")
    entry = {
        "sha256": weights.digest(file),
        "reader": content["sha256"],
        "parameters": sum(weight.numel() for weight in trained.parameters()),
        **{"steps": options.steps, "seed": options.seed, "tokens": seen, "seconds": round(seconds)},
        **{"commit": commit, "accepted": rows},
    }
    if options.publish:
        card.write(weights.FOLDER, {**content, "drafting": entry})
    else:
        (options.out / f"{model}-head.json").write_text(json.dumps(entry, indent=1) + "\n")


def held_out(length: int, count: int) -> Iterator[Text]:
    """`count` conversations of about `length` tokens, with names and forms that no training saw."""
    from sglang_hybrid.demo.reader import evaluation, examples

    rng = random.Random(f"head {length}")
    for _ in range(count):
        made = examples.encode(evaluation.held_out(rng, length, evaluation.TURNS[length]))
        yield made.ids, [(begin, end) for _, begin, end in made.answers]


if __name__ == "__main__":
    sys.exit(main())
