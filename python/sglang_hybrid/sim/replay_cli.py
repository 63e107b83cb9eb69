"""`sglang-hybrid replay`: a server's request log, its decisions taken again or its requests simulated."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid.core.reading import printable
from sglang_hybrid.prefix.policies import served
from sglang_hybrid.prefix.replay import replay
from sglang_hybrid.sim.live import simulate

_MOST = 20


def main(argv: Sequence[str]) -> int:
    """Run the command; exit status 1 if a decision came out differently. Raises ConfigError for bad input."""
    args = _parser().parse_args(argv)
    if args.simulate or args.policy or args.states or args.kv_tokens:
        for log in args.logs:
            _say(printable(log), *_simulated(log, args))
        return 0
    return max([_replayed(log) for log in args.logs])


def _replayed(log: Path) -> int:
    found = replay(log)
    end = "" if found.complete else " (the log ends early)"
    end += f" ({found.skipped} cut line skipped)" if found.skipped else ""
    _say(
        f"{printable(log)}: {found.requests} requests, {found.checkpoints} checkpoints, {found.evictions} evictions, "
        f"{len(found.differences)} decided differently{end}",
        *(f"  {difference}" for difference in found.differences[:_MOST]),
    )
    return 1 if found.differences else 0


def _simulated(log: Path, args: argparse.Namespace) -> list[str]:
    live = simulate(log, args.policy, args.states, args.kv_tokens)
    tokens = max(1, sum(live.prompts))
    lines = []
    for name, hits in (("served", sum(live.served)), ("simulated", sum(live.simulated))):
        lines.append(f"  {name:<10} {hits:>12,} of {tokens:,} tokens, {100 * hits / tokens:.1f} %")
    lines.append(f"  {live.different} of {len(live.served)} requests hit otherwise")
    if live.marking:
        lines.append(f"  {live.marking} of them marked segments, simulated as plain text: see simulate --segments-gb")
    return lines


def _say(*lines: str) -> None:
    for line in lines:
        print(line)  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid replay",
        description="Take the decisions of a server's request log again and compare them, or simulate its requests.",
        epilog="example:\n  sglang-hybrid replay requests.log --policy lru --states 200",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("logs", nargs="+", type=Path, metavar="LOG", help="a request log, as written under --hybrid-request-log")
    add("--simulate", action="store_true", help="send its requests through a simulated server and compare the hits")
    add("--policy", default="", help=f"simulate another policy: {', '.join(served())}, marconi:ALPHA")
    add("--states", type=int, default=0, help="simulate another number of state slots")
    add("--kv-tokens", type=int, default=0, help="simulate another size of the KV pool, in tokens")
    return parser
