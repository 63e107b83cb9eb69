"""`python -m sglang_hybrid.cpu_environment`: make SGLang and transformers importable in an environment without CUDA.

PyPI's torchvision is built for CUDA and does not load beside a CPU build of PyTorch, and SGLang wants to be told that
there is no GPU. Our own commands see to both. This one leaves a file beside the installed packages, so that whatever
else starts Python there is served too: `import transformers`, `sglang.Engine`, `python -m sglang.launch_server`.
"""

from __future__ import annotations

import os
import sys

_START = (
    "import importlib.util as u; u.find_spec('sglang_hybrid') and "
    "__import__('sglang_hybrid.cpu_environment').cpu_environment.enter()\n"
)


def enter() -> None:
    """What happens at each start of Python: a default for SGLang, and an eye on imports that would fail.

    Every start pays for what is imported here: nothing.
    """
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if not any(isinstance(finder, _BeforeTheImport) for finder in sys.meta_path):  # lib64 is often a link to lib
        sys.meta_path.insert(0, _BeforeTheImport())  # type: ignore[arg-type]


class _BeforeTheImport:
    """Finds no module; puts our CPU platform in place right before somebody imports what needs it."""

    done = False

    def find_spec(self, name: str, *_: object) -> None:
        if name in ("sglang", "torchvision") and not self.done:
            self.done = True  # not removed: somebody iterates over the finders
            from sglang_hybrid.plugin import activate_platform

            activate_platform()


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if the environment cannot be written to."""
    import argparse
    import sysconfig
    from pathlib import Path

    parser = argparse.ArgumentParser(prog="python -m sglang_hybrid.cpu_environment", description=__doc__)
    parser.add_argument("--remove", action="store_true", help="remove the file")
    # Python reads these files by name, and this one needs what an editable install adds.
    file = Path(sysconfig.get_path("purelib"), "sglang_hybrid_cpu_environment.pth")
    try:
        if parser.parse_args(argv).remove:
            file.unlink(missing_ok=True)
        else:
            file.write_text(_START)
    except OSError as error:
        print(f"error: cannot write to the environment: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
