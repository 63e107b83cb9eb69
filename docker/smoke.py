#!/usr/bin/env python3
"""Is a server up, does it answer, does its prefix cache serve a repeated prompt, and does it say so?

Standard library only, so that it runs in any image. Exit status 0 if every check passed, 1 if one failed, with the
reason on standard error.

    python3 docker/smoke.py [--url http://127.0.0.1:30000] [--timeout SECONDS] [--health-only]
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

METRICS = ("sglang:cache_hit_rate", "sglang:token_usage", "sglang:num_queue_reqs", "sglang:time_to_first_token_seconds")
POLL_S = 0.5
# Longer than the coarsest checkpoint grid in use (256 tokens), in any tokenizer.
SENTENCES = 120


class CheckFailed(Exception):
    """A check did not hold; the message says which and what was found."""


def fetch(url: str, body: dict[str, Any] | None = None, timeout: float = 60.0) -> str:
    """The text of a GET, or of a POST of `body`; raises urllib's errors."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return str(response.read().decode())


def wait_healthy(url: str, deadline: float) -> None:
    """Return once /health answers 200; raises CheckFailed when the time is up."""
    last: object = "no answer yet"
    while time.monotonic() < deadline:
        try:
            fetch(f"{url}/health", timeout=max(0.1, min(5.0, deadline - time.monotonic())))
            return
        except (OSError, ValueError) as error:  # refused, reset, timed out, or an error status while loading
            last = error
        time.sleep(POLL_S)
    raise CheckFailed(f"{url}/health did not become healthy in time, raise --timeout or read the server log: {last}")


def ask(url: str, model: str, prompt: str, timeout: float) -> dict[str, Any]:
    """One greedy chat completion: its text, prompt tokens and cached tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 8, "temperature": 0}
    answer = json.loads(fetch(f"{url}/v1/chat/completions", body, timeout))
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    text = answer["choices"][0]["message"]["content"] or ""
    return {"text": text, "prompt": usage["prompt_tokens"], "cached": details.get("cached_tokens") or 0}


def check_cache(url: str, timeout: float) -> str:
    """The same new prompt twice: equal answers, and the second one mostly from cache."""
    model = json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"]
    opening = f"Note {os.getpid()} of {time.time_ns()}. "  # new to the cache, whatever ran before
    prompt = opening + " ".join(f"Line {number} says that water runs downhill." for number in range(SENTENCES))
    first, second = (ask(url, model, prompt, timeout) for _ in range(2))
    if first["text"] != second["text"]:
        raise CheckFailed(f"the answer changed when the prompt came from cache: {first['text']!r}, {second['text']!r}")
    if second["cached"] <= second["prompt"] // 2:
        raise CheckFailed(f"a repeated prompt of {second['prompt']} tokens was not cached: {second['cached']} tokens")
    return f"{model}: {first['cached']} then {second['cached']} of {second['prompt']} prompt tokens from cache"


def check_metrics(url: str) -> str:
    """/metrics has the series the dashboard shows."""
    text = fetch(f"{url}/metrics")
    missing = [name for name in METRICS if name not in text]
    if missing:
        raise CheckFailed(f"/metrics lacks series, start the server with --enable-metrics: {', '.join(missing)}")
    return (
        f"/metrics has {len({line.split('{')[0] for line in text.splitlines() if line.startswith('sglang:')})} series"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for health, and for each answer")
    parser.add_argument("--health-only", action="store_true", help="stop after /health: for a container's health check")
    options = parser.parse_args()
    url = options.url.rstrip("/")
    try:
        wait_healthy(url, time.monotonic() + options.timeout)
        if options.health_only:
            return 0
        for line in (check_cache(url, options.timeout), check_metrics(url)):
            sys.stdout.write(f"smoke: {line}\n")
    except (CheckFailed, urllib.error.URLError, OSError, KeyError, ValueError) as error:
        sys.stderr.write(f"smoke: failed: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
