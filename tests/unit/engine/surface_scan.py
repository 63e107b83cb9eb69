"""What the package's sources use of SGLang, read from their syntax trees."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[3] / "python" / "sglang_hybrid"
PRIVATE = re.compile(r"_[A-Za-z]\w*")


def sources() -> dict[str, ast.Module]:
    """Syntax tree by owner: the module's name below `engine`, or below the package for the two launchers."""
    engine = {path: path.relative_to(PACKAGE / "engine") for path in (PACKAGE / "engine").rglob("*.py")}
    owners = {path: ".".join(name.with_suffix("").parts).removesuffix(".__init__") for path, name in engine.items()}
    owners |= {PACKAGE / f"{name}.py": name for name in ("launch_server", "bench_serving")}
    return {owner: ast.parse(path.read_text("utf-8")) for path, owner in owners.items()}


def imports(tree: ast.Module) -> set[str]:
    """What is imported from SGLang, as 'module:name'; a module that is imported as a whole without a name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _sglang(node.module or ""):
            found |= {f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if _sglang(alias.name)}
    return found


def names(tree: ast.Module) -> set[str]:
    """Texts that are names in SGLang, written out in the code instead of in the list."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {text for text in texts if re.fullmatch(r"sglang(\.\w+)+[.:]?[\w.]*", text)}


def bases(tree: ast.Module) -> set[str]:
    """SGLang's classes that are subclassed, as 'module:name'."""
    origin = _origins(tree)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {
        origin[base.id] for node in classes for base in node.bases if isinstance(base, ast.Name) and base.id in origin
    }


def assigned(tree: ast.Module) -> set[str]:
    """What is assigned to in SGLang's modules and classes, as 'module:name.attribute', and `__class__`."""
    origin, found = _origins(tree), set()
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            path, at = [], target
            while isinstance(at, (ast.Attribute, ast.Subscript)):
                path += [at.attr] if isinstance(at, ast.Attribute) else []
                at = at.value
            if path and isinstance(at, ast.Name) and at.id in origin:
                found.add(".".join([origin[at.id], *reversed(path)]))
            if "__class__" in path:
                found.add("__class__")
    return found


def private(owner: str, tree: ast.Module) -> set[str]:
    """Underscore names of other objects that a module reaches, and those it shares with SGLang's classes it extends."""
    found, own = set(), _defined(tree)
    extended = _extended_source(owner)
    for node in ast.walk(tree):
        name, of_self = None, False
        if isinstance(node, ast.Attribute):
            name = node.attr
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            of_self |= isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
        elif isinstance(node, ast.FunctionDef):
            name, of_self = node.name, True
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if not isinstance(name, str) or not PRIVATE.fullmatch(name):
            continue
        if re.search(rf"\b{name}\b", extended) if of_self else name not in own:
            found.add(name)
    return found


def _sglang(module: str) -> bool:
    return module == "sglang" or module.startswith("sglang.")


def _origins(tree: ast.Module) -> dict[str, str]:
    """'module:name' in SGLang by the local name it is imported under."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and _sglang(node.module or "")]
    return {alias.asname or alias.name: f"{node.module}:{alias.name}" for node in nodes for alias in node.names}


def _defined(tree: ast.Module) -> set[str]:
    """Names that a module defines: functions, classes, variables, attributes of its own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


@cache
def _extended_source(owner: str) -> str:
    """The source of SGLang's classes that those of a module extend, directly, through others of ours or as mixins."""
    if owner in ("launch_server", "bench_serving"):
        return ""
    module = importlib.import_module("sglang_hybrid.engine" + ("." + owner if owner else ""))
    ours = {cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__}
    users = {user for cls in ours for user in _descendants(cls)}
    theirs: set[Any] = {base for user in users for base in user.__mro__ if _sglang(base.__module__)}
    return "\n".join(inspect.getsource(cls) for cls in theirs)


def _descendants(cls: type) -> set[type]:
    return {cls}.union(*(_descendants(each) for each in type.__subclasses__(cls)))


def calls(tree: ast.Module) -> set[str]:
    """Calls of methods as 'object.method', and of setattr as 'setattr(object)'."""
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            found.add(f"{node.func.value.id}.{node.func.attr}")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            found.add(f"setattr({ast.unparse(node.args[0])})")
    return found
