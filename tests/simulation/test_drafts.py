"""Simulated days of servers that speculate: a head, a draft model, n-grams; chains and trees, both event loops.

What drafts is judged as the target is: its KV and what it is fed are those of its prefix, whatever was resumed.
"""

from __future__ import annotations

import pytest

from sglang_hybrid.engine import compat
from tests.simulation.process import ELASTIC, ROWS, SMALL, Models, simulate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not compat.complete(), reason="with other versions nothing is drafted on a CPU"),
]

HEAD = ("--speculative-algorithm", "NEXTN")
NGRAM = (
    "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8", "--speculative-ngram-capacity", "100000",
)  # fmt: skip
TREE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "3", "--speculative-num-draft-tokens", "8")
TRACK = ("--mamba-track-interval", "64")
OVERLAP = ("--hybrid-cpu-event-loop", "overlap")
LAZY = ("--mamba-radix-cache-strategy", "extra_buffer_lazy")
URGENT = ("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "0")
LOAD = ("stops", "pauses", "long_answers", "hang_ups", "conversations")


@pytest.mark.parametrize(
    ("preset", "seed", "flags"),
    [
        ("mtp", 101, (*SMALL, *HEAD, *TREE, *OVERLAP, *URGENT)),
        ("mtp", 201, (*ELASTIC, *HEAD, *OVERLAP, *URGENT)),
        ("mtp", 301, (*SMALL, *TREE, *URGENT, "STANDALONE")),
        ("mtp", 401, (*SMALL, *HEAD, "--mamba-radix-cache-strategy", "no_buffer")),
        ("mamba2", 3002, (*SMALL, *NGRAM, *OVERLAP, *LAZY, *URGENT)),
    ],
)
def test_a_day_of_a_server_that_speculates(models: Models, preset: str, seed: int, flags: tuple[str, ...]) -> None:
    if "STANDALONE" in flags:
        drafts = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(models("draft")))
        flags = (*flags[:-1], *drafts)
    [result] = simulate(models(preset), seed, 1, (*flags, *TRACK, *ROWS), "--preset", preset, "--shapes", *LOAD)
    assert result["hit_tokens"] > 0
    assert result["tokens_per_verification"] > 1.5


@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("gdn", (*NGRAM[:3], "16", *NGRAM[4:], "--context-length", "400", "--max-total-tokens", "3072", *ROWS)),
        ("mtp", (*HEAD, "--max-total-tokens", "700", "--max-running-requests", "2", *OVERLAP)),
    ],
    ids=["the context ends", "all KV is taken"],
)
def test_answers_run_to_the_end(models: Models, preset: str, flags: tuple[str, ...]) -> None:
    """What a step sets aside lies behind them: in the next row of SGLang's table, or nowhere: they were given up."""
    few = ("--max-mamba-cache-size", "24", "--chunked-prefill-size", "256", *TRACK)
    [result] = simulate(models(preset), 31, 1, (*flags, *few), "--preset", preset, "--shapes", "full_contexts")
    assert "AbortReq" not in result["outputs"]


@pytest.mark.skipif(not compat.complete(), reason="other versions are refused")
@pytest.mark.parametrize(
    ("seed", "flags"),
    [(711, (*SMALL, *OVERLAP, "--hicache-write-policy", "write_back")), (601, ELASTIC)],
    ids=["write_back, overlap", "elastic"],
)
def test_copies_to_and_from_a_host_tier_end_late(models: Models, seed: int, flags: tuple[str, ...]) -> None:
    """Nobody reads a state before it is there, nor uses the memory of one that is still being copied."""
    options = ("--preset", "mtp", "--late", "--shapes", *LOAD, "documents", "scan")
    flags = (*flags, *HEAD, *TRACK, *ROWS, *URGENT, "--enable-hierarchical-cache", "--hicache-ratio", "2")
    [result] = simulate(models("mtp"), seed, 1, flags, *options)
    assert result["outputs"]["late_copies"] > 30
