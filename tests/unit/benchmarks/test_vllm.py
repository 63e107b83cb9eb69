"""The comparison with vLLM: equal bytes, the same prompts, and nobody above endless memory."""

import json

import pytest

from benchmarks import provenance
from benchmarks.serving.contention import SIZES, replies
from benchmarks.serving.servers import split
from benchmarks.serving.vllm import BUDGETS_MB, REQUESTS
from sglang_hybrid.core.spec import MAMBA_FULL_MEMORY_RATIO, preset


def test_states_and_tokens_take_the_budget_and_no_more() -> None:
    spec = preset("marconi-7b")
    budget = 40 * spec.checkpoint_bytes
    _, states, _, tokens = split(budget, MAMBA_FULL_MEMORY_RATIO, spec.checkpoint_bytes, spec.kv_bytes_per_token)
    held = int(states) * spec.checkpoint_bytes, int(tokens) * spec.kv_bytes_per_token
    assert budget - spec.kv_bytes_per_token < sum(held) <= budget
    assert held[0] / held[1] == pytest.approx(MAMBA_FULL_MEMORY_RATIO, rel=0.1)


@pytest.mark.parametrize("workload", SIZES)
def test_every_server_got_the_same_prompts_and_none_beats_endless_memory(workload: str) -> None:
    result = json.loads((provenance.place("serving") / f"vllm-{workload}.json").read_text())
    assert [run["budget_mb"] for run in result["runs"]] == list(BUDGETS_MB)
    for run in result["runs"]:
        asked = [n_input for _, n_input in replies(workload, run["seed"], REQUESTS)]
        for name in ("hybrid", "here 0.9", "stock 0.9", "vllm"):
            rows = sorted((row[0], row[2], row[3]) for row in run["rows"] if row[1] == name)
            assert [tokens for _, tokens, _ in rows] == asked
            rate = sum(cached for *_, cached in rows) / sum(asked)
            assert run[name]["hit_rate"] == pytest.approx(rate)
            assert rate < run["unbounded_hit_rate"] + 0.001
