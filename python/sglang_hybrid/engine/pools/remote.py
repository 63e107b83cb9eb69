"""`sglang-hybrid doctor --url`: what a running server says of its cache and of its elastic memory."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from http.client import HTTPException

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.doctor import status
from sglang_hybrid.engine.doctor.installation import Finding
from sglang_hybrid.engine.series import ELASTIC

Figures = dict[tuple[str, str], float]

_SERIES = re.compile(rf"^{ELASTIC}(\w+?)(?:_total)?(?:\{{(.*)\}})? (\S+)$", re.MULTILINE)
_KIND = re.compile(r'kind="(\w+)"')


def examine(page: str, url: str) -> list[Finding]:
    """One finding per line of the metrics `page` of a server: its cache, then elastic memory.

    Raises ConfigError if the page at `url` is another one.
    """
    findings = status.describe(page)
    if not findings:
        raise ConfigError(f"these are not the metrics of SGLang; correct --url: {url}")
    return findings + (describe(found) if (found := read(page)) else [])


def fetch(url: str, api_key: str | None = None) -> str:
    """The metrics of a server or router; raises ConfigError if there are none at `url`."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"give the server's address, for example http://127.0.0.1:30000: {url}")
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        request = urllib.request.Request(url.rstrip("/") + "/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ConfigError(f"these metrics need the server's --api-key: {url}") from error
        raise ConfigError(
            f"the server shows no metrics; start it with --enable-metrics: {url} (status {error.code})"
        ) from error
    except (OSError, ValueError, HTTPException) as error:  # the last: what answers does not speak HTTP
        raise ConfigError(f"no server answers there; start it, or correct --url: {url} ({error})") from error


def read(text: str) -> Figures:
    """The figures of telemetry.py by (name, kind), out of a page of metrics; empty where memory is static."""
    found: Figures = {}
    for name, labels, value in _SERIES.findall(text):
        kind = _KIND.search(labels)
        found[name, kind[1] if kind else ""] = float(value)
    return found


def describe(found: Figures) -> list[Finding]:
    """The section: who has the granules, what moving them cost, and what went wrong."""
    total, granule_bytes = found["granules_budget", ""], found["granule_bytes", ""]
    resident = found["granules_resident", ""]
    kinds = sorted(kind for name, kind in found if name == "granules_used")
    used = sum(found["granules_used", kind] for kind in kinds)
    lines = [
        Finding(
            "budget", f"{total:,.0f} granules of {granule_bytes:,.0f} bytes, {total * granule_bytes / 1e6:,.1f} MB"
        ),
        *(_kind(kind, found) for kind in kinds),
        Finding(
            "resident",
            f"{resident:,.0f} granules ({resident * granule_bytes / 1e6:,.1f} MB), "
            f"{found['granules_at_hand', '']:,.0f} of them made ahead; {used:,.0f} used",
        ),
        Finding(
            "high-water marks",
            f"{found['granules_used_max', '']:,.0f} used, {found['granules_resident_max', '']:,.0f} mapped",
        ),
        Finding("reclaimed", f"{found['reclaims', '']:,.0f} times memory was there once torch gave back what it kept"),
        Finding("transfers", f"{found['transfers', '']:,.0f} granules changed kind"),
        *(_calls(kind, found) for kind in ("map", "unmap", "grow")),
        Finding("waits", f"{found['waits', '']:,.0f} times a request or chunk had to wait for memory"),
    ]
    if used > total:
        lines.append(Finding("account", f"{used:,.0f} used of {total:,.0f}", "report this: granules are counted twice"))
    return lines


def _kind(kind: str, found: Figures) -> Finding:
    return Finding(
        {"kv": "KV", "state": "states", "segment": "segments"}.get(kind, kind),
        f"{found['granules_used', kind]:,.0f} granules used, {100 * found['fragmentation', kind]:.0f} % of them holes; "
        f"{found['granules_unused', kind]:,.0f} mapped and empty; {found['evictions', kind]:,.0f} evictions",
    )


def _calls(kind: str, found: Figures) -> Finding:
    problem = None
    if kind == "map" and found["failures", kind]:
        problem = "the machine's memory ran out while the budget had room; lower the budget, or free memory"
    return Finding(
        {"grow": "a column more"}.get(kind, kind),
        f"{found['calls', kind]:,.0f} calls, {found['granules_moved', kind]:,.0f} granules, "
        f"{found['failures', kind]:,.0f} failed; p50 {1e3 * found['seconds_p50', kind]:.2f} ms, "
        f"p99 {1e3 * found['seconds_p99', kind]:.2f} ms ({1e3 * found['processor_seconds_p99', kind]:.2f} computing)",
        problem,
    )
