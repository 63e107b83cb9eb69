"""Whether a package runs as C extensions that were built beside its sources (`scripts/compile`), or interpreted.

Python imports an extension before a source of the same name, so a source that was changed since would be shadowed.
`form`, called by the package's `__init__` before anything else is imported, removes extensions that are out of date.
"""

import logging
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

logger = logging.getLogger(__name__)

SUFFIX = EXTENSION_SUFFIXES[0]


def form(package: Path) -> str:
    """ "compiled" or "interpreted"; raises ImportError where extensions are out of date and cannot be removed."""
    built = {path.parent / path.name.removesuffix(SUFFIX): path for path in package.rglob(f"*{SUFFIX}")}
    if not built:
        return "interpreted"
    modules = {module for module in built if not module.name.endswith("__mypyc")}
    sources = {path.with_suffix(""): path for path in package.rglob("*.py") if path.name != "__init__.py"}
    wrong = sources.keys() ^ modules
    wrong |= {module for module, path in sources.items() if module in built and _newer(path, built[module])}
    if not wrong:
        return "compiled"
    names = ", ".join(sorted(str(module.relative_to(package)) for module in wrong))
    try:
        for path in built.values():
            path.unlink(missing_ok=True)  # another process may be doing the same
    except OSError as error:
        raise ImportError(f"delete *{SUFFIX} in {package} ({error.strerror}); changed since: {names}") from error
    logger.warning(
        "%s runs interpreted, scripts/compile compiles it again; changed since then: %s", package.name, names
    )
    return "interpreted"


def _newer(source: Path, extension: Path) -> bool:
    try:
        return source.stat().st_mtime_ns > extension.stat().st_mtime_ns
    except FileNotFoundError:  # another process found the same, and removes it
        return True
