"""`python -m sglang_hybrid.bench_serving`: SGLang's serving benchmark, same flags, same output keys."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run SGLang's benchmark client with the process's arguments."""
    from sglang_hybrid.core.errors import ConfigError
    from sglang_hybrid.engine import compat
    from sglang_hybrid.engine.launch import platform
    from sglang_hybrid.plugin import activate_platform

    if platform.cuda_devices() == 0:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        activate_platform()
    try:
        compat.check_engine()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    from sglang.benchmark.serving import cli_main

    cli_main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
