"""How well a reader reads: `python -m sglang_hybrid.demo.evaluate --model reader-gdn [--checkpoint DIR --publish]`.

Without a checkpoint, the published weights are evaluated. With one, its weights are rounded to bfloat16, evaluated and
written with a model card into the checkpoint's folder; `--publish` writes both into the package. Of a training that
began with the published weights, those half way between the two are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.demo.model import READERS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_hybrid.demo.evaluate", description=__doc__)
    parser.add_argument("--model", choices=READERS, required=True)
    parser.add_argument("--checkpoint", type=Path, help="folder of a training, in place of the published weights")
    parser.add_argument("--publish", action="store_true", help="write weights and card into the package")
    parser.add_argument("--questions", type=int, default=500, help="of each kind at least; of seen forms a quarter")
    parser.add_argument("--lengths", default="2048,8192,512", help="tokens of a conversation (default: %(default)s)")
    parser.add_argument("--note", default="", help="about the machine, for the card")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        _evaluate(options)
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    return 0


def _evaluate(options: argparse.Namespace) -> None:
    import torch

    from sglang_hybrid.demo.reader import card, checkpoint, evaluation, weights

    if options.threads:
        torch.set_num_threads(options.threads)
    folder, file = weights.FOLDER, None
    content: dict[str, Any] = {"model": options.model}
    here = head()
    if options.checkpoint:
        trained = checkpoint.load(options.checkpoint)
        if trained["model"] != options.model:
            raise ConfigError(f"the checkpoint is of {trained['model']}, not of {options.model}: {options.checkpoint}")
        folder = weights.FOLDER if options.publish else options.checkpoint
        file = folder / f"{options.model}.safetensors"
        state, before = trained["network"], trained["before"]
        if before:
            state = weights.halfway(options.model, state, before[-1]["sha256"])
        weights.write(state, file)
        content |= {
            "sha256": (digest := weights.digest(file)),
            **{name: trained[name] for name in ("tokens", "curve")},
            "seconds": round(trained["seconds"]),
            "note": options.note or "nothing else said",
            "trainings": [
                *before,
                {"seed": trained["seed"], "steps": trained["step"], "commit": here["commit"], "sha256": digest}
                | ({"halfway": True} if before else {}),
            ],
        }
    else:
        content = weights.card(options.model)
    network = weights.network(options.model, file)
    content |= {
        "parameters": sum(weight.numel() for weight in network.parameters()),
        "pieces": network.model.embed_tokens.weight.shape[0],
        "head": here,
        "evaluations": [],
    }
    for length in map(int, options.lengths.split(",")):
        for forms in ("held", "train"):
            made = evaluation.drawn(length, forms, options.questions if forms == "held" else options.questions // 4)
            counts = evaluation.score(network, made)
            done = card.evaluated(length, forms, counts)
            content["evaluations"].append(done)
            print(f"{length} tokens, {forms} forms")  # noqa: T201
            for row in done["rows"]:
                print(f"  {row['kind']:22} {row['right']:5} of {row['questions']:5}  {row['share']}", flush=True)  # noqa: T201
            if options.checkpoint:
                card.write(folder, content)


def head() -> dict[str, Any]:
    """Machine, commit and versions, for the card."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
        commit = found.stdout.strip() or "unknown"
    except OSError:
        commit = "unknown"
    return {
        "machine": f"{os.cpu_count()} cores of {processor or platform.processor()}",
        "commit": commit,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "tokenizers", "safetensors")},
    }


if __name__ == "__main__":
    sys.exit(main())
