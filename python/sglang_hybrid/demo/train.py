"""Train one of the embedded readers: `python -m sglang_hybrid.demo.train --model reader-gdn --out DIR --minutes 180`.

Killed or out of disk, it goes on from its last checkpoint with `--resume`; with more minutes, it goes on after its end.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.demo.model import READERS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_hybrid.demo.train", description=__doc__)
    parser.add_argument("--model", choices=READERS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--minutes", type=float, help="of training, in all (default: 180)")
    parser.add_argument("--steps", type=int, help="instead of minutes: the same steps give the same weights")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of --out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (bfloat16 there)")
    parser.add_argument("--scale", type=int, default=1, help="tokens of a step, times this (a GPU: 16)")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch on a CPU (default: its own choice)")
    options = parser.parse_args(argv)
    try:
        _train(options)
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        return 130
    return 0


def _train(options: argparse.Namespace) -> None:
    import torch

    from sglang_hybrid.demo.reader import checkpoint
    from sglang_hybrid.demo.reader.training import Plan, Training

    if options.threads:
        torch.set_num_threads(options.threads)
    minutes = options.minutes if options.minutes or options.steps else 180.0
    plan = Plan(options.model, minutes, options.steps, options.seed, options.device, options.scale)
    options.out.mkdir(parents=True, exist_ok=True)
    training = Training(plan, options.out)
    if options.resume:
        training.resume()
    elif (options.out / checkpoint.NAME).exists():
        raise ConfigError(f"there is a checkpoint already; add --resume or take another folder: {options.out}")
    training.run(lambda line: print(line, flush=True))  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
