"""Generated workloads: determinism, structure, and the sizes of the traces they imitate."""

import numpy as np
import pytest

from sglang_hybrid.sim.reuse import ReuseIndex
from sglang_hybrid.sim.trace import Trace, TraceError
from sglang_hybrid.sim.workloads import WORKLOADS, generate, parse
from sglang_hybrid.sim.workloads.shifts import KINDS


def small(name: str, seed: int = 0) -> Trace:
    shape = {"requests": 60} if name in ("fewshot", "rag", "documents") else {"sessions": 5}
    return generate(name, seed, **({} if name in {kind.__name__ for kind in KINDS} else shape))


@pytest.mark.parametrize("name", WORKLOADS)
def test_same_seed_same_trace_and_another_seed_another(name: str) -> None:
    a, b, c = small(name), small(name), small(name, 1)
    a.check()
    assert [r.ts for r in a.requests] == [r.ts for r in b.requests]
    assert all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a.requests, b.requests, strict=True))
    assert not np.array_equal(a.requests[0].tokens, c.requests[0].tokens)


@pytest.mark.parametrize(
    ("name", "requests", "median_input", "median_output", "reusable"),
    [
        ("lmsys", 1533, 3093, 257, 0.98),
        ("sharegpt", 1318, 742, 64, 0.96),
        ("swebench", 3175, 8282, 139, 0.42),
        ("agentic", 2503, 13344, 136, 0.94),
        ("fewshot", 1500, 1247, 124, 0.82),
    ],
)
def test_sizes_follow_the_published_traces(
    name: str, requests: int, median_input: int, median_output: int, reusable: float
) -> None:
    trace = generate(name, 0)
    index = ReuseIndex(trace)
    assert len(trace) == pytest.approx(requests, rel=0.08)
    assert float(np.median(index.n_input)) == pytest.approx(median_input, rel=0.15)
    assert float(np.median([r.n_output for r in trace.requests])) == pytest.approx(median_output, rel=0.15)
    assert index.seen_tokens.sum() / trace.n_input_tokens == pytest.approx(reusable, abs=0.06)


@pytest.mark.parametrize("name", ["lmsys", "sharegpt", "agentic"])
def test_appending_sessions_extend_their_last_turn(name: str) -> None:
    last: dict[str, np.ndarray] = {}
    for r in small(name).requests:
        if r.turn:
            before = last[r.session]
            assert np.array_equal(r.input_tokens[: len(before)], before)
        last[r.session] = r.tokens


def test_rewriting_agents_part_from_their_last_turn_in_the_middle() -> None:
    trace = generate("swebench", 2, sessions=3)
    last: dict[str, np.ndarray] = {}
    parted = 0
    for r in trace.requests:
        before = last.get(r.session)
        if before is not None and r.turn > 7:
            n = min(len(before), r.n_input)
            shared = int((before[:n] != r.input_tokens[:n]).argmax())
            assert 0 < shared < len(before) - 500
            parted += 1
        last[r.session] = r.tokens
    assert parted > 30


def test_agents_share_their_system_prompt() -> None:
    a, b = (r for r in generate("agentic", 0, sessions=2).requests if r.turn == 0)
    assert np.array_equal(a.tokens[:1505], b.tokens[:1505])
    assert not np.array_equal(a.tokens[:1520], b.tokens[:1520])


def test_heavy_tailed_gaps_change_times_only() -> None:
    def spread(sigma: float) -> float:
        trace = generate("agentic", 0, sessions=20, gap_sigma=sigma)
        times: dict[str, list[float]] = {}
        for r in trace.requests:
            times.setdefault(r.session, []).append(r.ts)
        gaps = np.concatenate([np.diff(t) for t in times.values()])
        return float(np.percentile(gaps, 99) / np.median(gaps))

    assert spread(1.5) > 4 * spread(0.0)


def test_phases_follow_one_another_and_tenants_overlap() -> None:
    def spans(name: str) -> dict[str, tuple[float, float]]:
        found: dict[str, tuple[float, float]] = {}
        for r in small(name).requests:
            tenant = r.session.split()[0]
            found[tenant] = (found.get(tenant, (r.ts, r.ts))[0], r.ts)
        return found

    phases, mixed = spans("phases"), spans("mixed")
    assert phases["chat"][1] < phases["agents"][0] < phases["agents"][1] < phases["templates"][0]
    assert mixed["chat"][0] < mixed["agents"][1]
    assert mixed["templates"][0] < mixed["chat"][1]


def test_the_text_form_names_parameters() -> None:
    a, b = parse("workload:agentic?seed=3&sps=0.5&sessions=4"), generate("agentic", 3, sps=0.5, sessions=4)
    assert a.name == b.name == "agentic,sessions=4,sps=0.5#3"
    assert np.array_equal(a.requests[-1].tokens, b.requests[-1].tokens)
    assert parse("sharegpt?sessions=2", default_seed=9).name == "sharegpt,sessions=2#9"


@pytest.mark.parametrize(
    "text",
    [
        "workload:chess",
        "workload:agentic?color=1",
        "workload:agentic?sps=fast",
        "workload:agentic?sps=-1",
        "workload:agentic?sps=0",
        "workload:agentic?sps=nan",
        "workload:agentic?sessions=2.5",
        "workload:agentic?seed=-1",
        "workload:agentic?seed=0.5",
    ],
)
def test_wrong_names_and_values_are_refused(text: str) -> None:
    with pytest.raises(TraceError):
        parse(text)


def test_what_a_phase_of_turnover_used_never_comes_back_but_for_the_system_prompts() -> None:
    trace = generate("turnover", 4, sessions=6, documents=2, cycles=2, system_tokens=100, document_tokens=900)
    phases = [[r for r in trace.requests if r.session.split()[1] == str(phase)] for phase in range(5)]
    assert [r for phase in phases for r in phase] == list(trace.requests)
    assert [len(phase) for phase in phases] == [30, 8, 30, 8, 30]
    assert len({r.tokens[:100].tobytes() for phase in phases[::2] for r in phase}) <= 3
    assert len({r.tokens[:900].tobytes() for phase in phases[1::2] for r in phase}) == 4
    assert len({r.tokens[100:120].tobytes() for phase in phases[::2] for r in phase}) == 18
