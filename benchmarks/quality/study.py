"""What the studies of this folder ask for, and how each of them leaves its result."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import provenance
from sglang_hybrid.demo.model import READERS
from sglang_hybrid.demo.reader import evaluation, weights


def parser(about: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", choices=READERS, default="reader-gdn")
    return made


def write(study: str, model: str, head: dict[str, Any], seed: int = evaluation.SEED, **found: Any) -> None:
    """Write what `study` found of the published weights of `model`; `head`: from before it was measured."""
    result = {**head, "model": model, "weights": weights.card(model)["sha256"], "seed": seed, **found}
    print(provenance.write("quality", f"{study}-{model}", result))
