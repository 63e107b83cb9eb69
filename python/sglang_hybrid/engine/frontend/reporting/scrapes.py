"""`/metrics` names every series alike for every Prometheus.

Prometheus 2 asks for OpenMetrics and does not say `escaping=allow-utf-8`, as Prometheus 3 does. prometheus_client 0.26
then writes samples as `sglang_...`, although a colon is a letter of metric names, and every query for `sglang:...` is
empty. So who does not say it gets the text format, which both read, and which keeps the colon.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

_KEEPS_NAMES = b"escaping=allow-utf-8"

_App = Callable[[Any, Any, Any], Awaitable[None]]


def keep_names(_: Any, app: Any, *__: Any, **___: Any) -> None:
    """Hooked behind the mounting of `/metrics`, the last route of `app`."""
    route = app.routes[-1]
    route.app = _plain(route.app)


def _plain(page: _App) -> _App:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        headers = scope.get("headers", [])
        if not any(name.lower() == b"accept" and _KEEPS_NAMES in value for name, value in headers):
            scope = {**scope, "headers": [pair for pair in headers if pair[0].lower() != b"accept"]}
        await page(scope, receive, send)

    return answer
