"""`python -m sglang_hybrid.bench_serving`: SGLang's serving benchmark, same flags, same output keys.

With SGLang's native or chat backend its cache report is on, and the reasons of what missed stand below it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_REPORTING = ("sglang", "sglang-native", "sglang-oai-chat")
"""Backends whose answers say what came from the cache; with sglang-oai SGLang's client (0.5.21) fails on that."""

_PREFIX = "miss_"


def main() -> int:
    """Run SGLang's benchmark client with the process's arguments."""
    from sglang_hybrid.core.errors import ConfigError
    from sglang_hybrid.engine import compat
    from sglang_hybrid.engine.launch import platform, writable
    from sglang_hybrid.plugin import activate_platform

    try:
        writable.check()
        if platform.cuda_devices() == 0:
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            activate_platform()
        compat.check_engine()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if _value("--backend", "sglang") in _REPORTING and "--cache-report" not in sys.argv:
        sys.argv.append("--cache-report")
    outputs = _keep_outputs()
    from sglang.benchmark.serving import cli_main

    cli_main()
    _report(missed_tokens(outputs), _value("--output-file", ""))
    return 0


def missed_tokens(outputs: Iterable[Any]) -> dict[str, int]:
    """Prompt tokens by reason, most first, out of SGLang's outputs; {} for a server without our cache."""
    missed: Counter[str] = Counter()
    for output in outputs:
        for key, tokens in (output.cached_tokens_details or {}).items():
            if key.startswith(_PREFIX):
                missed[key.removeprefix(_PREFIX)] += tokens
    return dict(missed.most_common())


def _value(flag: str, default: str) -> str:
    for at, word in enumerate(sys.argv):
        if word == flag and at + 1 < len(sys.argv):
            return sys.argv[at + 1]
        if word.startswith(flag + "="):
            return word.removeprefix(flag + "=")
    return default


def _keep_outputs() -> list[Any]:
    """The outputs of the measured requests, of which SGLang prints sums only; filled when they are there."""
    from sglang.benchmark import serving

    kept: list[Any] = []
    calculate = serving.calculate_metrics

    def keeping(*arguments: Any, **named: Any) -> Any:
        kept.extend(named["outputs"])
        return calculate(*arguments, **named)

    serving.calculate_metrics = keeping
    return kept


def _report(missed: dict[str, int], output_file: str) -> None:
    """As SGLang prints its own, and beside its cache report in the last row of `output_file`."""
    if not missed:
        return
    print("{s:{c}^{n}}".format(s="Prompt tokens not cached, by reason", n=50, c="-"))  # noqa: T201
    for reason, tokens in missed.items():
        print(f"{reason + ':':<40} {tokens:<10}")  # noqa: T201
    print("=" * 50)  # noqa: T201
    if output_file:
        *before, last = Path(output_file).read_text(encoding="utf-8").splitlines(keepends=True)
        row = json.loads(last)
        row["cache_report"]["miss_tokens"] = missed
        Path(output_file).write_text("".join([*before, json.dumps(row) + "\n"]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
