"""Prefixes that chat clients mark with `cache_control`, asked for several times: ours beside stock SGLang.

    python -m benchmarks.serving.marks [--shape documents|agents] [--prefixes 24] [--questions 4] [--seed 1]

`documents`: a chat of one message, a document, then a question of its own. `agents`: tools and a system text of its own
for each agent, then a question. Through `/v1/chat/completions`; the prefixes take turns in random order, so that one
comes back after many others, and pools hold about two thirds of them. `marked` sends the mark (of agents: on the last
tool and on the system text), the others do not. `roomy` is `marked` with pools that hold everything: what no eviction
can reach. The bound of the hit rate is what is left if every prefix were computed once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.serving.servers import ENVIRONMENT, STOCK, Client, chunks, text
from sglang_hybrid.demo import model
from sglang_hybrid.demo.server import LAUNCHER, Server

DOCUMENT, QUESTION, ANSWER = 1500, 150, 4
"""Characters, each of them a token, and tokens of an answer."""

TOOLS = 1100
"""Characters of a prefix that describe an agent's tools; the rest is its system text."""

MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

RUNNING, ROOMY = 4, 512


def sizes(documents: int, roomy: bool = False) -> list[str]:
    """States for two thirds of the documents beside those of running requests, KV to match."""
    states = ROOMY if roomy else 5 * RUNNING + 2 * documents // 3
    tokens = ROOMY * 512 if roomy else documents * (DOCUMENT + QUESTION) * 2 // 3 + RUNNING * 4096
    return [
        "--max-mamba-cache-size",
        str(states),
        "--max-total-tokens",
        str(tokens),
        "--max-running-requests",
        str(RUNNING),
    ]


def requests(documents: int, questions: int, seed: int) -> list[tuple[int, str, str]]:
    """The number of a document, the document and a question, in the order in which they are asked."""
    rng = random.Random(seed)
    texts = [text(rng, DOCUMENT) for _ in range(documents)]
    order = [number for _ in range(questions) for number in rng.sample(range(documents), documents)]
    return [(number, texts[number], text(rng, QUESTION)) for number in order]


def document(text_: str, question: str, mark: bool) -> dict[str, Any]:
    """A chat about a document."""
    parts = [{"type": "text", "text": text_, **(MARK if mark else {})}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": parts}]}


def agent(text_: str, question: str, mark: bool) -> dict[str, Any]:
    """A request of an agent: two tools, a system text, a question."""
    described, system = text_[:TOOLS], text_[TOOLS:]
    halves = described[: TOOLS // 2], described[TOOLS // 2 :]
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": f"tool_{at}", "description": half, "parameters": {"type": "object"}}}
        for at, half in enumerate(halves)
    ]
    tools[-1] |= MARK if mark else {}
    first = {"role": "system", "content": [{"type": "text", "text": system, **(MARK if mark else {})}]}
    return {"tools": tools, "tool_choice": "none", "messages": [first, {"role": "user", "content": question}]}


SHAPES = {"documents": document, "agents": agent}


def ask(server: Server, asked: dict[str, Any]) -> tuple[float, int, int]:
    """Seconds to the first token, tokens of the prompt and cached ones."""
    body = {"model": "m", **asked, "max_tokens": ANSWER, "temperature": 0, "stream_options": {"include_usage": True}}
    found = list(chunks(server.url + "/v1/chat/completions", body))
    usage = found[-1][1]["usage"]
    return found[0][0], usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def measure(server: Server, asked: list[tuple[int, str, str]], mark: bool, shape: str) -> dict[str, Any]:
    Client(server).flush()
    seen: dict[int, int] = {}
    rows = []
    for number, prefix, question in asked:
        seen[number] = seen.get(number, 0) + 1
        rows.append((seen[number], *ask(server, SHAPES[shape](prefix, question, mark))))
    row: dict[str, Any] = {"hit_rate": round(sum(cached for *_, cached in rows) / sum(n for _, _, n, _ in rows), 4)}
    for nth in sorted(set(seen.values()) | {2, 3}):
        of = [(cached, prompt) for at, _, prompt, cached in rows if at == nth]
        row[f"hit_rate_of_request_{nth}"] = round(sum(c for c, _ in of) / max(1, sum(p for _, p in of)), 4)
    times = sorted(1000 * seconds for at, seconds, *_ in rows if at > 1)
    row["ttft_p50_ms"] = round(statistics.median(times), 1)
    row["ttft_p95_ms"] = round(times[int(0.95 * len(times))], 1)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="documents")
    parser.add_argument("--prefixes", type=int, default=24)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    head = provenance.head("sglang", "torch")
    asked = requests(given.prefixes, given.questions, given.seed)
    scarce, roomy = sizes(given.prefixes), sizes(given.prefixes, roomy=True)
    rows = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = model.build(Path("models") / "demo-gdn", "gdn").resolve()
        template = Path(scratch) / "chat.jinja"
        template.write_text(TEMPLATE)
        chat = ["--chat-template", str(template)]
        stock = [*STOCK, "--mamba-radix-cache-strategy", "extra_buffer", *scarce, *chat]
        ours, free = [*scarce, *chat], [*roomy, *chat]
        commands = {"stock": ("sglang.launch_server", stock), "ours": (LAUNCHER, ours), "roomy": (LAUNCHER, free)}
        servers = {}
        for name, (launcher, flags) in commands.items():
            log = Path(scratch) / f"{name}.log"
            servers[name] = stack.enter_context(
                Server(folder, flags, log=log, environment=ENVIRONMENT, launcher=launcher)
            )
            servers[name].wait_ready()
        for server in servers.values():  # what is done once is done before anything is timed
            measure(server, requests(4, 2, 99), True, given.shape)
        for name, server, mark in (
            ("stock", servers["stock"], True),
            ("ours, unmarked", servers["ours"], False),
            ("ours, marked", servers["ours"], True),
            ("ours, marked, roomy", servers["roomy"], True),
        ):
            rows.append({"server": name, **measure(server, asked, mark, given.shape)})
            print(rows[-1], flush=True)
    whole = DOCUMENT + QUESTION
    bound = DOCUMENT * (given.questions - 1) / (whole * given.questions)
    shape = {**vars(given), "prefix_tokens": DOCUMENT, "question_tokens": QUESTION, "flags": scarce}
    print(
        provenance.write(
            "serving", f"marks-{given.shape}", {**head, **shape, "bound_hit_rate": round(bound, 4), "rows": rows}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
