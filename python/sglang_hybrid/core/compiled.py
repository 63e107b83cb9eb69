"""Whether a package runs as C extensions that were built beside its sources (`scripts/compile`), or interpreted.

Python imports an extension before a source of the same name. So a source that was changed since would be shadowed;
`form`, called by the package's `__init__`, refuses that.
"""

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

SUFFIX = EXTENSION_SUFFIXES[0]
REMEDY = "run scripts/compile, or scripts/compile --remove to use the sources"


def form(package: Path) -> str:
    """ "compiled" or "interpreted"; raises ImportError where extensions are not those of the sources beside them."""
    built = {path.parent / path.name.removesuffix(SUFFIX): path for path in package.rglob(f"*{SUFFIX}")}
    built = {module: path for module, path in built.items() if not module.name.endswith("__mypyc")}
    if not built:
        return "interpreted"
    sources = {path.with_suffix(""): path for path in package.rglob("*.py") if path.name != "__init__.py"}
    wrong = sources.keys() ^ built.keys()
    wrong |= {module for module, path in sources.items() if module in built and _newer(path, built[module])}
    if wrong:
        names = ", ".join(sorted(str(module.relative_to(package)) for module in wrong))
        raise ImportError(f"{REMEDY}; changed since they were compiled: {names}")
    return "compiled"


def _newer(source: Path, extension: Path) -> bool:
    return source.stat().st_mtime_ns > extension.stat().st_mtime_ns
