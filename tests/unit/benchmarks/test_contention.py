"""What the simulator says beside the servers that contend for states."""

import json

import pytest

from benchmarks import provenance
from benchmarks.serving.contention import SIZES, replies, simulated
from sglang_hybrid.core.spec import preset


@pytest.mark.parametrize("workload", SIZES)
def test_the_simulator_tells_what_was_served_and_no_server_beats_endless_memory(workload: str) -> None:
    result = json.loads((provenance.place("serving") / f"contention-gdn-{workload}.json").read_text())
    found = result["workloads"][workload]
    prompts = sorted((row[0], row[2]) for row in found["rows"] if row[1] == "hybrid")
    assert [n_input for _, n_input in replies(workload, found["seed"])] == [tokens for _, tokens in prompts]
    served = found["hybrid"]["hit_rate"]
    again = simulated(workload, found["seed"], preset("marconi-7b"))
    for told in (found, again):
        assert told["predicted_hit_rate"] == pytest.approx(served, abs=0.003)
        assert told["unbounded_hit_rate"] > served - 0.001  # ages are those of the server there, and steps here
