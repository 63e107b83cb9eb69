"""Addresses of servers, as users name them."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def server(url: str) -> SplitResult | None:
    """The parts of an address such as http://10.0.0.1:30000, which has no path; None where `url` is none."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 80) and parts.path in ("", "/")
    except ValueError:
        return None
    return parts if right else None
