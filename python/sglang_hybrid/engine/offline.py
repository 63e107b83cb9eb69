"""`sglang_hybrid.Engine`: SGLang's offline engine, without an HTTP server, with our cache and our checks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.launch import early, flags, preparation
from sglang_hybrid.engine.processes import embedded

_PREFIX = "hybrid_"


def Engine(**arguments: Any) -> Any:
    """Start `sglang.Engine` with what the launcher would start a server with, and return it.

    `arguments` are SGLang's, and ours as `hybrid_<name>`: `Engine(model_path=..., hybrid_policy="lru")`. As with
    SGLang's, the calling script needs `if __name__ == "__main__"`. Requests and answers are SGLang's too:
    `meta_info["cached_tokens_details"]` has a `miss_<reason>` for every prompt token that was not cached.

    Call it before anything imports SGLang. Raises ConfigError for what the launcher would refuse, and EngineDied, as
    every call of it does, when one of its processes died: this process goes on, and may make another.
    """
    config, given = split(arguments)
    words = as_flags(given)
    preparation.enter(words, config, early.read(words))
    final, notes = preparation.complete(flags.parse_engine(words), words, config)
    parsed = vars(flags.parse_engine(final))
    added = {flag.removeprefix("--").replace("-", "_") for flag in final[len(words) :] if flag.startswith("--")}
    from sglang.srt.entrypoints.engine import Engine as StockEngine

    for note in notes:
        warnings.warn(note, stacklevel=2)
    return embedded.start(StockEngine, given | {name: parsed[name] for name in added})


def split(arguments: Mapping[str, Any]) -> tuple[HybridConfig, dict[str, Any]]:
    """Our configuration and what is SGLang's; raises ConfigError for a bad value of ours."""
    ours = {name.removeprefix(_PREFIX): value for name, value in arguments.items() if name.startswith(_PREFIX)}
    given = {name: value for name, value in arguments.items() if not name.startswith(_PREFIX)}
    if "server_args" in given:
        raise ConfigError("pass SGLang's arguments one by one, not as server_args: defaults of ours depend on them")
    config = HybridConfig.from_mapping(ours)
    flags.require_served(config.policy)
    return config, given


def as_flags(given: Mapping[str, Any]) -> list[str]:
    """The command line that says the same, for the checks; what none can say is left to SGLang."""
    words: list[str] = []
    for name, value in given.items():
        flag = flags.spelled(name)
        if name == "lora_paths" and isinstance(value, dict):
            value = [f"{adapter}={path}" for adapter, path in value.items()]
        if value is True:
            words.append(flag)
        elif isinstance(value, _WORDS) and value is not False:
            words += [flag, _word(value)]
        elif isinstance(value, (list, tuple)) and value and all(isinstance(each, _WORDS) for each in value):
            words += [flag, *map(_word, value)]
    return words


_WORDS = (str, int, float, dict)


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)
