"""Paths of requests to a server behind a proxy that strips a prefix (`--fastapi-root-path`).

uvicorn puts the prefix in front again, and what goes by the path goes wrong: health checks want a key, mistakes of
Anthropic's clients get OpenAI's form, marks are read at no endpoint.
"""

from __future__ import annotations

from typing import Any

DOCUMENTATION = ("/docs", "/redoc", "/openapi.json")
"""Pages that name each other by the path a browser sees."""


def strip_root(_: Any, scope: Any, *__: Any, **___: Any) -> None:
    """BEFORE hook of an application that is called: a request's path is that of its route."""
    root = str(scope.get("root_path", "")).rstrip("/")
    path = str(scope.get("path", ""))
    if scope["type"] not in ("http", "websocket") or not root or not path.startswith(root + "/"):
        return
    route = path.removeprefix(root)
    if not route.startswith(DOCUMENTATION):
        scope["path"], scope["root_path"] = route, ""
        scope["raw_path"] = scope.get("raw_path", path.encode()).removeprefix(root.encode())
