"""The `sglang-hybrid` command: serve, simulate, replay, doctor, spec."""

from __future__ import annotations

import sys

from sglang_hybrid import __version__
from sglang_hybrid.core.errors import ConfigError

_USAGE = f"""sglang-hybrid {__version__}
usage: sglang-hybrid COMMAND ...

  serve ...          start a server (the same as python -m sglang_hybrid.launch_server)
  simulate ...       replay traces against cache policies and capacities
  replay LOG ...     take the decisions of a server's request log again and compare them; exit status 1 if one differs
  replay --simulate LOG ...
                     simulate its requests: the same server, or another --policy, --states, --kv-tokens
  spec MODEL ...     what a model costs: bytes per token, bytes per checkpoint, FLOPs (preset, folder or config.json)
  doctor             this environment and what is wrong with it; exit status 1 if something is
  doctor --url URL   the elastic memory of a running server: granules by kind, calls and their times, high-water marks
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; exit status 2 for bad input."""
    arguments = sys.argv[1:] if argv is None else argv
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help"):
        print(_USAGE)  # noqa: T201
        return 0
    if command == "--version":
        print(__version__)  # noqa: T201
        return 0
    if command not in COMMANDS:
        print(f"error: no such command; choose one of {', '.join(COMMANDS)}: {command}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        return COMMANDS[command](rest)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2


def _serve(arguments: list[str]) -> int:
    from sglang_hybrid import launch_server

    return launch_server.main(arguments)


def _simulate(arguments: list[str]) -> int:
    from sglang_hybrid.sim import cli

    return cli.main(arguments)


def _replay(arguments: list[str]) -> int:
    from sglang_hybrid.sim import replay_cli

    return replay_cli.main(arguments)


def _spec(arguments: list[str]) -> int:
    from sglang_hybrid.core import spec

    if not arguments:
        raise ConfigError(f"name at least one model: a folder, a config.json or one of {', '.join(spec.PRESETS)}")
    for model in arguments:
        known = spec.preset(model) if model in spec.PRESETS else spec.from_config(model)
        for key, value in spec.describe(known):
            print(f"{key:<24} {value}")  # noqa: T201
    return 0


def _doctor(arguments: list[str]) -> int:
    from sglang_hybrid.engine.launch import doctor
    from sglang_hybrid.engine.pools import remote

    if arguments and (arguments[0] != "--url" or len(arguments) != 2):
        raise ConfigError(f"doctor takes --url URL or nothing: {' '.join(arguments)}")
    findings = remote.examine(arguments[1]) if arguments else doctor.examine()
    for finding in findings:
        print(finding)  # noqa: T201
    return 1 if any(finding.problem for finding in findings) else 0


COMMANDS = {"serve": _serve, "simulate": _simulate, "replay": _replay, "spec": _spec, "doctor": _doctor}

if __name__ == "__main__":
    sys.exit(main())
