"""Serve an embedded model that reads, hold two conversations with it and show what the prefix cache did."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_hybrid import __version__
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.demo import conversation, model
from sglang_hybrid.demo.server import Server, ServerDied

_MODELS = Path("models")
_READER = "reader-gdn"
_REQUEST_LOG = _MODELS / "quickstart-requests.log"


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 only if every answer is right and every later turn was served from cache."""
    options = _options(argv)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 130)
    began = time.monotonic()
    try:
        folder = options.model or _build(console)
        flags = ["--served-model-name", "demo", "--enable-metrics", "--hybrid-request-log", str(_REQUEST_LOG)]
        with Server(folder, flags, port=options.port or None, log=_log_file(), outlive=not options.once) as server:
            ready_seconds = _wait(console, server)
            rows = _converse(console, server, folder, began)
            wrong = [fault for row in rows if (fault := _fault(row, judged=options.model is None))]
            if options.json:
                _write(options.json, rows, not wrong, ready_seconds, time.monotonic() - began)
    except (ConfigError, ServerDied, TimeoutError, RuntimeError) as error:
        console.print(f"quickstart failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    if not options.once:
        console.print(
            f"the server keeps running at {server.url}/v1 (model name: demo); stop it: kill {server.process.pid}"
        )
    what = "every answer is right" if options.model is None else "every answer came"
    console.print(
        "\n".join(wrong) or f"{what} and every later turn was served from cache",
        style="red" if wrong else "green",
        markup=False,
    )
    return 1 if wrong else 0


def _fault(row: conversation.Row, judged: bool) -> str:
    """What is wrong with a turn, or nothing; `judged`: whether a wrong answer is."""
    where = f"conversation {row.conversation}, turn {row.turn}"
    if judged and not row.right:
        return f"{where}: the answer is WRONG"
    return f"{where} was NOT served from cache" if row.turn > 1 and not row.cached_tokens else ""


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop the server after the conversation")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the table as JSON")
    parser.add_argument("--port", type=int, default=30000, help="0 takes any free port (default: 30000)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="serve this model instead of the embedded one")
    return parser.parse_args(argv)


def _build(console: Console) -> Path:
    with console.status("building the embedded model"):
        start = time.monotonic()
        folder = model.build(_MODELS / _READER, _READER)
    seconds = time.monotonic() - start
    console.print(f"model: {folder} ({seconds:.1f} s), of 1.5 million parameters: it reads, and knows nothing else")
    return folder


def _log_file() -> Path:
    _MODELS.mkdir(exist_ok=True)
    return _MODELS / "quickstart-server.log"


def _wait(console: Console, server: Server) -> float:
    console.print(f"server: starting on {server.url}, log in {server.log}")
    said = 0.0

    def progress(seconds: float, line: str) -> None:
        nonlocal said
        if seconds - said >= 5:  # plain lines, so that a log file shows them too
            said = seconds
            console.print(f"  [{seconds:3.0f} s] {line[:110]}", markup=False)

    ready_seconds = server.wait_ready(progress=progress)
    console.print(f"server: ready after {ready_seconds:.1f} s")
    for line in server.log.read_text(errors="replace").splitlines():
        if "] sglang-hybrid is active" in line or "]   " in line:
            console.print("  " + line.split("] ", 1)[-1], markup=False)
    return ready_seconds


def _converse(console: Console, server: Server, folder: Path, began: float) -> list[conversation.Row]:
    from openai import OpenAI

    client = OpenAI(base_url=server.url + "/v1", api_key="none", timeout=900, max_retries=0)
    rows = []
    for row in conversation.hold(client, "demo", _tokens_of(folder)):
        if not rows:
            console.print(f"first answer {time.monotonic() - began:.1f} s after the start of this command")
        rows.append(row)
        console.print(f"  [{row.conversation}.{row.turn}] {row.question}", markup=False, style="bold")
        console.print(f"        {row.answer}", markup=False)
    console.print(_table(rows))
    return rows


def _tokens_of(folder: Path) -> Callable[[list[dict[str, str]], str], list[int]]:
    """How the server tokenises a conversation: the model's own template and tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def tokens(messages: list[dict[str, str]], answer: str) -> list[int]:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(prompt + answer, add_special_tokens=False)["input_ids"])

    return tokens


def _table(rows: list[conversation.Row]) -> Table:
    table = Table("conversation", "turn", "prompt tokens", "cached tokens", "TTFT", "why not cached")
    for row in rows:
        table.add_row(
            str(row.conversation),
            str(row.turn),
            str(row.prompt_tokens),
            f"{row.cached_tokens} ({row.cached_tokens / row.prompt_tokens:.0%})",
            f"{row.ttft_seconds * 1e3:.0f} ms",
            row.reason,
        )
    return table


def _write(path: Path, rows: list[conversation.Row], ok: bool, ready_seconds: float, total_seconds: float) -> None:
    result: dict[str, Any] = {
        "version": __version__,
        "ok": ok,
        "setup_seconds": int(os.environ.get("SGLANG_HYBRID_SETUP_SECONDS", "0")),
        "ready_seconds": round(ready_seconds, 3),
        "total_seconds": round(total_seconds, 3),
        "requests": [{**asdict(row), "behind_tokens": row.behind_tokens, "reason": row.reason} for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
