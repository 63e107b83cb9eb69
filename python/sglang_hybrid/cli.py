"""The `sglang-hybrid` command: serve, cluster, route, simulate, replay, doctor, spec."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from typing import TYPE_CHECKING

from sglang_hybrid import __version__
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.process import take_care_of_files

if TYPE_CHECKING:
    from sglang_hybrid.core.spec import ModelSpec

_USAGE = f"""sglang-hybrid {__version__}
usage: sglang-hybrid COMMAND ...

  serve ...          start a server (the same as python -m sglang_hybrid.launch_server)
  cluster ...        several servers on this machine, or prefill/decode pairs, and a router before them
  route ...          a router before servers that run: to the one that can resume a prompt furthest
  simulate ...       replay traces against cache policies and capacities
  replay LOG ...     take the decisions of a server's request log again and compare them; exit status 1 if one differs
  replay --simulate LOG ...
                     simulate its requests: the same server, or another --policy, --states, --kv-tokens
  spec MODEL ...     what a model costs: bytes per token, bytes per checkpoint, FLOPs (preset, folder or config.json);
                     --memory-gb N: how many states and tokens fit
  doctor             this environment and what is wrong with it; exit status 1 if something is
  doctor --url URL   a running server: hit rate, miss reasons with what to do about each, pools, elastic memory
  help [COMMAND]     this text, or the flags of a command (COMMAND --help); version: the version

example: sglang-hybrid simulate server.log --model Qwen/Qwen3.5-35B-A3B
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; exit status 2 for bad input."""
    arguments = sys.argv[1:] if argv is None else argv
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("help", "-h", "--help"):
        if rest and rest[0] in COMMANDS:
            return main([rest[0], "--help"])
        if not rest:
            print(_USAGE)  # noqa: T201
            return 0
        command = rest[0]
    if command in ("version", "-V", "--version"):
        print(__version__)  # noqa: T201
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"
        print(f"error: no such command; {remedy}: {command}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        return COMMANDS[command](rest)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2


def _serve(arguments: list[str]) -> int:
    # Become the launcher: a spawned child imports its parent's main module, and only the launcher's prepares it.
    os.execv(sys.executable, [sys.executable, "-m", "sglang_hybrid.launch_server", *arguments])


def _cluster(arguments: list[str]) -> int:
    take_care_of_files()
    from sglang_hybrid.cluster import local

    return local.main(arguments)


def _route(arguments: list[str]) -> int:
    take_care_of_files()
    from sglang_hybrid.cluster import route

    return route.main(arguments)


def _simulate(arguments: list[str]) -> int:
    from sglang_hybrid.sim import cli

    return cli.main(arguments)


def _replay(arguments: list[str]) -> int:
    from sglang_hybrid.sim import replay_cli

    return replay_cli.main(arguments)


def _spec(arguments: list[str]) -> int:
    from sglang_hybrid.core import spec_cli

    return spec_cli.main(arguments, _cpu_sizes)


def _cpu_sizes(budget_bytes: int, spec: ModelSpec) -> tuple[int, int]:
    """Tokens and states as the launcher chooses them, in the environment that it makes; raises ConfigError."""
    try:
        from sglang_hybrid.core.config import HybridConfig
        from sglang_hybrid.engine.launch import cpu_profile, slots
        from sglang_hybrid.plugin import activate_platform

        config = HybridConfig()
        for name, value in {**cpu_profile.environment(config), **slots.environment(config)}.items():
            os.environ.setdefault(name, value)
        activate_platform()
        return cpu_profile.sizes(budget_bytes, spec)
    except ImportError as error:
        raise ConfigError(f"install what a server needs, or leave out --cpu: {error}") from error


def _doctor(arguments: list[str]) -> int:
    options = _doctor_parser().parse_args(arguments)
    if options.url is None:
        from sglang_hybrid.engine.doctor import installation

        findings = installation.examine()
    else:
        from sglang_hybrid.cluster import status
        from sglang_hybrid.engine.pools import remote

        page = remote.fetch(options.url, options.api_key)
        findings = status.describe(page) or remote.examine(page, options.url)
    for finding in findings:
        print(finding)  # noqa: T201
    return 1 if any(finding.problem for finding in findings) else 0


def _doctor_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid doctor",
        description="This environment and what is wrong with it, or a running server or router; exit status 1 for a "
        "problem.",
        epilog="example:\n  sglang-hybrid doctor --url http://127.0.0.1:30000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", help="what the server or router at this address says of caches and memory")
    parser.add_argument("--api-key", help="of that server, where it asks for one")
    return parser


COMMANDS = {
    "serve": _serve,
    "cluster": _cluster,
    "route": _route,
    "simulate": _simulate,
    "replay": _replay,
    "spec": _spec,
    "doctor": _doctor,
}

if __name__ == "__main__":
    sys.exit(main())
