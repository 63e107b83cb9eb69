"""Loaded by a server's processes at their start: every output says why tokens missed (baseline of `stream_cost`).

That was so until 2026-11-26. Imports of the server's packages have to wait until it makes them.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

_HOOKS = "sglang_hybrid.engine.cache.hooks"


class _Patch(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _HOOKS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def patched(module: Any) -> None:
            run(module)
            module.details = lambda result, _, req: module.explained(result, module.tracked(req))

        spec.loader.exec_module = patched  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Patch())
