"""Exact totals of small seeded replays: any change of a trace, a ceiling or a decision shows here as another integer.

A change that is meant changes the numbers below, in the same commit, with its reason.
"""

import zlib

import pytest

from sglang_hybrid.core.spec import preset
from sglang_hybrid.sim import Trace, grid, open_cache, replay
from sglang_hybrid.sim.ceilings import Clairvoyant
from sglang_hybrid.sim.reuse import ReuseIndex
from sglang_hybrid.sim.segments.cache import Memory
from sglang_hybrid.sim.workloads import parse

MODEL = preset("marconi-7b")
POLICIES = ("lru", "superseded", "vllm+", "marconi:0.5", "marconi", "forecast")

# workload: requests, input tokens, checksum of all tokens, reusable tokens
TRACES = {
    "sharegpt?seed=7&sessions=12": (172, 152223, 2126077812, 147365),
    "lmsys?seed=7&sessions=8": (145, 618381, 316105316, 611993),
    "agentic?seed=7&sessions=8": (164, 2149343, 177302990, 1995590),
    "swebench?seed=7&sessions=8": (245, 2453711, 42672014, 1156569),
    "fewshot?seed=7&requests=200": (200, 427342, 2885107641, 311757),
    "rag?seed=7&requests=120": (120, 430094, 1630959497, 170128),
    "mixed?seed=7&sessions=4": (771, 2412443, 1812892186, 2092655),
    "phases?seed=7&sessions=4": (270, 1719847, 504305809, 880705),
    "documents?seed=7&requests=80": (110, 1164768, 3098187911, 402163),
    "skills?seed=7&sessions=16": (100, 1168323, 2858688279, 969638),
}

# (workload, capacity in GB): tokens skipped by a clairvoyant, then by each of POLICIES
HITS = {
    ("sharegpt?seed=7&sessions=12", 0.5): (120485, 75405, 86354, 13055, 76012, 79386, 101309),
    ("lmsys?seed=7&sessions=8", 1.0): (465500, 353852, 366317, 99195, 354060, 353872, 340303),
    ("agentic?seed=7&sessions=8", 2.0): (884034, 500430, 504153, 249376, 508987, 500430, 920397),
    ("swebench?seed=7&sessions=8", 3.0): (1137144, 305773, 306943, 61761, 297110, 312806, 1058839),
    ("fewshot?seed=7&requests=200", 1.0): (260289, 69009, 69009, 13376, 98276, 106638, 207029),
    ("rag?seed=7&requests=120", 1.0): (115939, 49365, 49365, 46816, 51184, 48840, 75186),
    ("mixed?seed=7&sessions=4", 2.0): (894284, 327494, 333099, 129952, 319299, 294200, 829531),
    ("phases?seed=7&sessions=4", 1.0): (621987, 125426, 127247, 62948, 128058, 129160, 502108),
}


def checksum(trace: Trace) -> int:
    crc = 0
    for r in trace.requests:
        crc = zlib.crc32(r.tokens.astype("<i4").tobytes(), crc)
    return crc


@pytest.mark.parametrize("text", TRACES)
def test_the_trace_is_the_one_that_was_committed(text: str) -> None:
    trace = parse(text)
    seen = int(ReuseIndex(trace).seen_tokens.sum())
    assert (len(trace), trace.n_input_tokens, checksum(trace), seen) == TRACES[text]


@pytest.mark.parametrize(("text", "gb"), HITS)
def test_every_policy_skips_exactly_as_many_tokens_as_before(text: str, gb: float) -> None:
    trace, capacity = parse(text), round(gb * 1e9)
    found = [int(Clairvoyant(ReuseIndex(trace), capacity, MODEL).hits().sum())]
    for policy in POLICIES:
        result = replay(trace, open_cache(policy, capacity, MODEL), capacity)
        result.check()
        found.append(int(result.hit_tokens.sum()))
    assert tuple(found) == HITS[text, gb]


# (workload, row of segments at 8 GB, 3 of them for segments, share of transitions that are kept): tokens hit, of them
# by segments, and entries made
SEGMENTS = {
    ("documents?seed=7&requests=80", "forecast+segments", 1.0): (677681, 488005, 323),
    ("documents?seed=7&requests=80", "forecast+segments", 0.3): (721849, 512419, 331),
    ("documents?seed=7&requests=80", "clairvoyant+segments", 1.0): (785483, 572231, 207),
    ("documents?seed=7&requests=80", "unbounded+segments", 1.0): (959451, 568025, 165),
    ("skills?seed=7&sessions=16", "forecast+segments", 1.0): (1017318, 48815, 83),
    ("skills?seed=7&sessions=16", "unbounded+segments", 1.0): (1021720, 53217, 68),
}


@pytest.mark.parametrize(("text", "policy", "kept"), SEGMENTS)
def test_segments_reuse_exactly_as_many_tokens_as_before(text: str, policy: str, kept: float) -> None:
    source, memory = grid.Source(f"workload:{text}"), Memory(3 * 10**9, kept=kept)
    (cell,) = grid.cells([source], [preset("qwen3.5-35b-a3b")], [policy], [8.0], segments=memory)
    found = grid.run_cell(cell).fields
    assert found["false_hits"] == 0
    assert (found["hit_tokens"], found["segment_tokens"], found["entries_made"]) == SEGMENTS[text, policy, kept]
