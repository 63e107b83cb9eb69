"""The command line: our flags first (SGLang drops names it does not know), everything else to SGLang's own parser."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from typing import NoReturn

from sglang_hybrid.core.config import REPLACED, HybridConfig, read_mapping
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.prefix import policies


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are ConfigErrors: SGLang's usage text is several screens long."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists every flag")


def spelled(name: str) -> str:
    """How a setting is called on the command line."""
    return "--" + name.replace("_", "-")


def replicas(dp_size: int | None, dp_attention: bool | None) -> int:
    """Copies of the model; data-parallel attention shares the ranks of one out, and adds none."""
    return 1 if dp_attention else int(dp_size or 1)


def attention_groups(namespace: argparse.Namespace) -> int:
    """Groups of ranks that share the layers and serve requests of their own; 0.5.23 has a flag of its own for them.

    Experts that ranks keep for one another (`--dwdp-size`) make a group of each rank.
    """
    if (weights := getattr(namespace, "dwdp_size", 1) or 1) > 1:
        return int(weights)
    if getattr(namespace, "enable_dp_attention", False):
        return int(namespace.dp_size or 1)
    return int(getattr(namespace, "attn_dp_size", 1) or 1)


def hybrid_parser() -> argparse.ArgumentParser:
    """`--hybrid-config` and one flag per field of HybridConfig; a flag that is not given is absent from the result."""
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    group = parser.add_argument_group("sglang-hybrid")
    group.add_argument(
        "--hybrid-config", metavar="FILE_OR_JSON", help="JSON or YAML file, or inline JSON; flags override it"
    )
    for option in dataclasses.fields(HybridConfig):
        group.add_argument(
            spelled("hybrid_" + option.name),
            dest=option.name,
            type=type(option.default),
            choices=option.metadata["choices"] or None,
            help=f"{option.metadata['help']}{_choices(option.name)} (default: {option.default})",
        )
    return parser


def split(argv: list[str]) -> tuple[HybridConfig, list[str]]:
    """Return our configuration and the arguments left for SGLang; raises ConfigError for a bad value of ours."""
    given, rest = hybrid_parser().parse_known_args(argv)
    values = vars(given)
    source = values.pop("hybrid_config", None)
    merged = {**(read_mapping(source) if source is not None else {}), **values}
    for flag in rest:  # those of earlier releases: the configuration says what became of them
        name = flag.partition("=")[0].removeprefix("--hybrid-").replace("-", "_")
        if flag.startswith("--hybrid-") and name in REPLACED:
            merged[name] = ""
    config = HybridConfig.from_mapping(merged)
    require_served(config.policy)
    return config, rest


def require_served(policy: str) -> None:
    """Raise ConfigError unless a server takes the policy of that name."""
    if not policies.find(policy).served:
        raise ConfigError(f"the policy is the simulator's, serve one of {', '.join(policies.served())}: {policy!r}")


def _choices(name: str) -> str:
    if name != "policy":
        return ""
    known = "; ".join(f"{known}: {policies.POLICIES[known].summary}" for known in policies.served())
    return f": {known}; marconi:ALPHA: Marconi with a fixed weight".replace("%", "%%")


def engine_parser() -> argparse.ArgumentParser:
    """SGLang's own parser, with errors as ConfigError."""
    from sglang.srt.server_args import ServerArgs

    parser = Parser(prog="python -m sglang_hybrid.launch_server", conflict_handler="resolve")
    ServerArgs.add_cli_args(parser)
    return parser


def given(argv: list[str]) -> set[str]:
    """The settings of SGLang that the user gave, by a flag, however abbreviated, or in a `--config` file."""
    parser = engine_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_known_args(_with_file(parser, argv))[0]))


def _with_file(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    if "--config" not in argv:
        return argv
    try:
        merged: list[str] = compat.settings_merger()(parser).merge_config_with_args(argv)
    except ValueError as error:
        raise ConfigError(f"SGLang does not take this --config file: {error}") from error
    return merged


def parse_engine(argv: list[str]) -> argparse.Namespace:
    """Parse SGLang's flags, naming the nearest known flag for one that does not exist."""
    parser = engine_parser()
    argv = _with_file(parser, argv)
    namespace, unknown = parser.parse_known_args(argv)
    if namespace.config is not None:
        raise ConfigError(
            f"SGLang reads its file of settings only if the flag is written in two words: --config {namespace.config}"
        )
    if unknown:
        ours = [flag for action in hybrid_parser()._actions for flag in action.option_strings]
        if (flag := unknown[0].split("=")[0]) in ours:  # all of the command line were taken out before
            raise ConfigError(f"SGLang's --config file has no settings of ours; use --hybrid-config: {flag}")
        known = [*ours, *(flag for action in parser._actions for flag in action.option_strings)]
        close = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"unknown argument; {hint}--help lists every flag: {unknown[0]}")
    return namespace


def help_text() -> str:
    """SGLang's help followed by ours."""
    ours = hybrid_parser().format_help().split("\n\n", 1)[1]
    return f"{engine_parser().format_help()}\n{ours}"
