"""Speculative decoding beside the cache: the tokens of an answer without it, and the hits of a server without it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality.questions import turns
from sglang_hybrid.demo.reader import evaluation
from sglang_hybrid.engine import compat
from sglang_hybrid.prefix.replay import replay
from tests.engine.prompts import CHUNK, HEAD, OVERLAP, TREE, prompts, words
from tests.engine.support import Client, Reference, ask

pytestmark = pytest.mark.engine

TRACK = 64  # tokens of an answer between two states
CHUNKS = ("--chunked-prefill-size", str(CHUNK), "--mamba-track-interval", str(TRACK))
SCARCE = ("--max-mamba-cache-size", "30", "--max-running-requests", "4", "--max-total-tokens", "3000")
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer")
ELASTIC = (
    "--hybrid-memory", "elastic", "--hybrid-cpu-memory-gb", "0.0062", "--max-running-requests", "6",
    "--enable-hierarchical-cache",
)  # fmt: skip

WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "head, overlap": ("mtp", (*HEAD, *OVERLAP, "--mamba-track-interval", str(TRACK))),
    "head, tree": ("mtp", (*HEAD, *TREE, *CHUNKS)),
    "head, tree, overlap": ("mtp", (*HEAD, *TREE, *OVERLAP, "--mamba-track-interval", str(TRACK))),
    "head, no_buffer": ("mtp", (*HEAD, *CHUNKS, *NO_BUFFER)),
    "head, pages": ("mtp", (*HEAD, *CHUNKS, "--page-size", "64")),
    "head, lazy": ("mtp", (*HEAD, *CHUNKS, "--mamba-radix-cache-strategy", "extra_buffer_lazy")),
    "head, host tier": ("mtp", (*HEAD, *CHUNKS, "--enable-hierarchical-cache")),
    "draft, tree": ("mtp", ("--speculative-algorithm", "STANDALONE", *TREE, *CHUNKS)),
    "draft, elastic, host tier": ("mtp", ("--speculative-algorithm", "STANDALONE", *CHUNKS, *ELASTIC)),
    "n-grams, delta rule": ("gdn", (*NGRAM, *CHUNKS)),
    "n-grams, delta rule, overlap": ("gdn", (*NGRAM, *OVERLAP, "--mamba-track-interval", str(TRACK))),
    "n-grams, Mamba-2": ("mamba2", (*NGRAM, *CHUNKS)),
    "n-grams, Kimi delta attention": ("kda", (*NGRAM, *CHUNKS)),
    "n-grams, attention": ("attention", (*NGRAM, "--chunked-prefill-size", str(CHUNK))),
}


@pytest.fixture
def start(serve: Callable[..., Client], models: Callable[[str], Path]) -> Callable[..., Client]:
    def server(preset: str, *flags: str) -> Client:
        drafts = ("--speculative-draft-model-path", str(models("draft"))) if "STANDALONE" in flags else ()
        return serve(preset, *flags, *drafts)

    return server


def converse(client: Client, reference: Reference, seed: int, turns: int = 3) -> tuple[int, float]:
    """Conversations that branch; returns how many turns resumed behind their prompts, and tokens per verification."""
    rng, resumed, said, verified = random.Random(seed), 0, 0, 0
    for prompt in prompts(seed, 4):
        history, asked = prompt, len(prompt)
        for turn in range(turns):
            answer = ask(client, history, 70)
            output, known = answer["output_ids"], answer["meta_info"]
            reference.assert_greedy(history, output)
            said, verified = said + len(output), verified + known["spec_verify_ct"]
            resumed += turn > 0 and known["cached_tokens"] > asked
            asked = len(history)
            history = history + output + words(rng, rng.choice([1, 40]))
    return resumed, said / verified


def test_a_head_drafts_and_the_cache_serves(
    start: Callable[..., Client], references: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = tmp_path_factory.mktemp("speculation") / "log.jsonl"
    client, reference = start("mtp", *HEAD, *CHUNKS, *SCARCE, "--hybrid-request-log", str(log)), references("mtp")
    resumed, at_once = converse(client, reference, seed=31)
    assert resumed >= 6, "a second turn resumes from a state that a verification passed"
    assert at_once > 1.5
    shared = words(random.Random(32), 200)
    hits = [ask(client, shared + words(random.Random(33 + i), 30), 2)["meta_info"]["cached_tokens"] for i in range(3)]
    assert hits[2] >= 192, "the point where the second prompt left the first was saved in its prefill"
    batch = prompts(34, 16)
    for prompt, (output, _) in zip(batch, client.generate_all(batch, tokens=66), strict=True):
        reference.assert_greedy(prompt, output, "many at once,")
    client.flush()
    again = replay(log)
    assert again.evictions > 5
    assert again.differences == []


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_drafting(way: str, start: Callable[..., Client], references: Callable[[str], Reference]) -> None:
    """The second round finds an empty cache and n-grams of the first: nearly all of an answer is accepted at once."""
    if "elastic, host tier" in way and not compat.complete():
        pytest.skip("a host tier is refused with other versions")
    preset, flags = WAYS[way]
    client, reference = start(preset, *flags), references(preset)
    resumed, at_once = converse(client, reference, seed=41)
    assert resumed >= (3 if "pages" in way else 5)
    if "--speculative-algorithm NGRAM" in " ".join(flags):
        salted = [(prompt, ask(client, prompt, 70, extra_key="empty")) for prompt in [*prompts(41, 4), *prompts(41, 4)]]
        for prompt, answer in salted:
            reference.assert_greedy(prompt, answer["output_ids"], "known n-grams,")
        at_once = sum(len(a["output_ids"]) for _, a in salted) / sum(
            a["meta_info"]["spec_verify_ct"] for _, a in salted
        )
        assert at_once > 5
    assert at_once > 1.5
    batch = prompts(42, 12)
    for prompt, (output, _) in zip(batch, client.generate_all(batch, tokens=66), strict=True):
        reference.assert_greedy(prompt, output, "many at once,")


@pytest.mark.slow
def test_the_readers_head_drafts_what_the_reader_says(
    start: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    client, reference, rng = start("reader-gdn", *HEAD, *OVERLAP), references("reader-gdn"), random.Random(35)
    hits = said = verified = 0
    for _ in range(4):
        for turn in turns(evaluation.held_out(rng, 700, 8)):
            answer = ask(client, turn.prompt, len(turn.answer))
            reference.assert_greedy(turn.prompt, answer["output_ids"], turn.kind)
            known = answer["meta_info"]
            hits, said = hits + (known["cached_tokens"] > 0), said + known["completion_tokens"]
            verified += known["spec_verify_ct"]
    assert hits >= 4 * 6
    assert said / verified > 2


@pytest.mark.slow
@pytest.mark.parametrize("flags", [HEAD, (*HEAD, *TREE), (*HEAD, *TREE, *OVERLAP)], ids=["chain", "tree", "overlap"])
def test_drawn_tokens_have_the_models_distribution(
    flags: tuple[str, ...], start: Callable[..., Client], references: Callable[[str], Reference]
) -> None:
    client, reference = start("mtp", *flags), references("mtp")
    prompt = words(random.Random(51), 70)
    sampling = {"temperature": 2.0, "top_k": 4, "top_p": 0.9, "n": 40}
    drawn = [tuple(a["output_ids"]) for _ in range(15) for a in ask(client, prompt, 4, sampling=sampling)]  # type: ignore[misc]
    checked = 0
    for at in range(4):
        for begin, count in Counter(answer[:at] for answer in drawn).items():
            if count < 100:
                continue
            logits = reference.logits(prompt, [*begin, 0])[-1] / 2.0
            best, tokens = logits.softmax(-1).topk(4)
            best = best / best.sum()
            kept = (best.cumsum(0) - best) < 0.9
            wanted = {
                int(token): float(p / best[kept].sum()) for token, p in zip(tokens[kept], best[kept], strict=True)
            }
            found = Counter(answer[at] for answer in drawn if answer[:at] == begin)
            assert set(found) <= set(wanted)
            for token, share in wanted.items():
                error = (share * (1 - share) / count) ** 0.5
                assert abs(found[token] / count - share) < 4.5 * error + 1e-3, (begin, token, share, found)
            checked += 1
    assert checked >= 3


@pytest.mark.slow
def test_answers_end_where_they_end_without_speculation(start: Callable[..., Client]) -> None:
    """Stop strings, patterns, schemas and log-probabilities: as from a server that does not speculate."""
    client, plain = start("mtp", *HEAD, *TREE, *CHUNKS), start("mtp", *CHUNKS)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted: list[dict[str, Any]] = [
        {"stop": ["a", "e ", "!"]},
        {"stop_regex": "[aeiou]{2}", "stop": ["zz", "Q"]},
        {"stop_token_ids": list(range(10, 60, 3))},
        {"regex": r"[a-z ]{5,30}\.", "ignore_eos": False},
        {"json_schema": json.dumps(schema), "ignore_eos": False},
    ]
    for number, prompt in enumerate(prompts(61, 20)):
        sampling = wanted[number % len(wanted)]
        more = {"return_logprob": True, "logprob_start_len": 0}
        one, other = (ask(server, prompt, 60, sampling=sampling, **more) for server in (client, plain))
        assert one["output_ids"] == other["output_ids"], sampling
        assert one["text"] == other["text"]
        assert one["meta_info"]["finish_reason"] == other["meta_info"]["finish_reason"]
        for name in ("input_token_logprobs", "output_token_logprobs"):
            pairs = zip(one["meta_info"][name], other["meta_info"][name], strict=True)
            assert all(a[1] == b[1] and abs((a[0] or 0.0) - (b[0] or 0.0)) < 2e-3 for a, b in pairs)
