"""Train one of the embedded readers: `python -m sglang_hybrid.demo.train --model reader-gdn --out DIR`.

Killed or out of disk, it goes on from its last checkpoint with `--resume`; with more steps, it goes on after its end.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.demo.model import READERS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_hybrid.demo.train", description=__doc__)
    parser.add_argument("--model", choices=READERS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=6000, help="in all (default: %(default)s)")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--resume", action="store_true", help="go on from the last checkpoint of --out")
    begin.add_argument("--from-published", action="store_true", help="begin with the published weights, in longer rows")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (bfloat16 there)")
    parser.add_argument("--scale", type=int, default=1, help="tokens of a step, times this (a GPU: 16)")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2, help="of one thread each, on a CPU")
    options = parser.parse_args(argv)
    try:
        _train(options)
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        return 130
    return 0


def _train(options: argparse.Namespace) -> None:
    from sglang_hybrid.demo.reader import checkpoint, team

    if options.steps < 1:
        raise ConfigError(f"--steps must be at least 1: {options.steps}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.resume:
        checkpoint.load(options.out)  # says what is wrong with it before another process starts
    elif (options.out / checkpoint.NAME).exists():
        raise ConfigError(f"there is a checkpoint already; add --resume or take another folder: {options.out}")
    size = options.processes if options.device == "cpu" else 1
    with TemporaryDirectory(prefix="sglang-hybrid-train-") as scratch:
        meeting = Path(scratch, "meeting")
        team.start(_follow, size, size, options, meeting)
        _work(0, size, options, meeting)


def _work(rank: int, size: int, options: argparse.Namespace, meeting: Path) -> None:
    """The training as one of `size` processes does it."""
    from sglang_hybrid.demo.reader import team
    from sglang_hybrid.demo.reader.training import Plan, Training

    plan = Plan(options.model, options.steps, options.seed, options.device, options.scale)
    with team.joined(meeting, rank, size) as joined:
        training = Training(plan, options.out, joined)
        if options.resume:
            training.resume()
        elif options.from_published:
            training.begin_with_published()
        training.run(lambda line: print(line, flush=True))  # noqa: T201


def _follow(rank: int, size: int, options: argparse.Namespace, meeting: Path) -> None:
    """`_work` in a process that the first one started; what is wrong with the input, that one says."""
    from sglang_hybrid.core.process import die_with_parent

    die_with_parent()
    with contextlib.suppress(ConfigError):
        _work(rank, size, options, meeting)


if __name__ == "__main__":
    sys.exit(main())
