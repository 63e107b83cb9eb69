"""Behind a proxy that strips a prefix, a request's path is that of its route."""

from __future__ import annotations

import pytest

from sglang_hybrid.engine.frontend.server import paths


@pytest.mark.parametrize(
    ("root", "path", "raw", "seen"),
    [
        ("/api", "/api/health", b"/api/health", ("/health", b"/health", "")),
        ("/api/", "/api/health", b"/api/health", ("/health", b"/health", "")),
        ("/api", "/api/api/health", b"/api/api/health", ("/api/health", b"/api/health", "")),
        ("/api", "/api/v1/models/a b", b"/api/v1/models/a%20b", ("/v1/models/a b", b"/v1/models/a%20b", "")),
        ("/api", "/api/docs", b"/api/docs", ("/api/docs", b"/api/docs", "/api")),
        ("/api", "/apiary", b"/apiary", ("/apiary", b"/apiary", "/api")),
        ("", "/health", b"/health", ("/health", b"/health", "")),
        ("/health", "/health", b"/health", ("/health", b"/health", "/health")),
    ],
)
def test_the_path_is_that_of_the_route(root: str, path: str, raw: bytes, seen: tuple[str, bytes, str]) -> None:
    scope = {"type": "http", "root_path": root, "path": path, "raw_path": raw}
    paths.strip_root(None, scope)
    assert (scope["path"], scope["raw_path"], scope["root_path"]) == seen


def test_a_server_that_starts_has_no_path() -> None:
    paths.strip_root(None, {"type": "lifespan"})
