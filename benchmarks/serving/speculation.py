"""What the prefix cache serves while something drafts, stock and ours, and how many tokens a verification brings.

    python -m benchmarks.serving.speculation

The embedded reader on the CPU platform; every figure is a count of tokens or passes, not a time. Scenarios are those of
`reuse`, with random tokens; conversations are held-out ones that the reader can answer, each with its right answers so
far. Ceilings: `seen`, the tokens that a server had processed before, and the tokens per pass of the reader's head on
texts of that length, from its card.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.quality.questions import Question, asked
from benchmarks.serving.reuse import scenarios
from benchmarks.serving.servers import Client, Command, hybrid, stock
from sglang_hybrid.demo import model
from sglang_hybrid.demo.reader import weights
from sglang_hybrid.demo.server import Server

MODEL, TOKENS, QUESTIONS = "reader-gdn", 512, 4
BASELINE = "stock, no drafts"
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
DRAFTS: dict[str, tuple[str, ...]] = {
    "no drafts": (),
    "head": ("--speculative-algorithm", "NEXTN", *CHAIN),
    "n-grams": ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"),
}


def command(ours: bool, flags: tuple[str, ...]) -> Command:
    """The server of an arm, with the same sizes."""
    if ours:
        return hybrid(*flags)
    launcher, given, environment = stock("extra_buffer", "python")
    return launcher, [*given, *flags], environment


def converse(client: Client, questions: list[Question]) -> dict[str, Any]:
    """Ask every question on an empty cache: tokens in, from cache and out, passes, and the answers."""
    client.flush()
    answers = [client.ask(question.prompt, len(question.answer)) for question in questions]
    verified = sum(answer["verified"] or 0 for answer in answers)
    said = sum(len(answer["output_ids"]) for answer in answers)
    return {
        "prompt_tokens": sum(len(question.prompt) for question in questions),
        "cached_tokens": sum(answer["cached_tokens"] for answer in answers),
        "answer_tokens": said,
        "verifications": verified,
        # The first token of an answer comes with the prompt.
        "tokens_per_verification": (said - len(answers)) / verified if verified else None,
        "answers": [answer["output_ids"] for answer in answers],
    }


def main() -> None:
    provenance.no_arguments(__doc__)
    head = provenance.head("sglang", "torch", "transformers", "sglang-hybrid")
    questions = asked(TOKENS, QUESTIONS)
    arms: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = model.build(Path(scratch) / MODEL, MODEL)
        for drafts, flags in DRAFTS.items():
            for ours in (False, True):
                name = f"{'ours' if ours else 'stock'}, {drafts}"
                launcher, given, environment = command(ours, flags)
                log = Path(scratch) / f"{len(arms)}.log"
                with Server(folder, given, log=log, environment=environment, launcher=launcher) as server:
                    server.wait_ready()
                    client = Client(server)
                    arms[name] = {"scenarios": list(scenarios(client)), "conversations": converse(client, questions)}
                print(name, [row["cached_tokens"] for row in arms[name]["scenarios"]], flush=True)
    said = {name: answers(arm) for name, arm in arms.items()}
    for name, arm in arms.items():
        pairs = list(zip(said[name], said[BASELINE], strict=True))
        arm["answers_equal"], arm["answers"] = sum(one == other for one, other in pairs), len(pairs)
    accepted = weights.card(MODEL)["drafting"]["accepted"]
    ceiling = {"seen": [row["seen"] for row in arms[BASELINE]["scenarios"]], "head": accepted}
    result = {**head, "model": MODEL, "tokens": TOKENS, "ceiling": ceiling, "arms": arms}
    print(provenance.write("serving", "speculation", result))


def answers(arm: dict[str, Any]) -> list[list[int]]:
    """All answers of an arm, taken out of its result."""
    return [*(row.pop("output_ids") for row in arm["scenarios"]), *arm["conversations"].pop("answers")]


if __name__ == "__main__":
    main()
