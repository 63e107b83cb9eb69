"""The answer in words: each sentence follows from figures of the grid, and is left out where they are missing."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_hybrid.core.spec import preset
from sglang_hybrid.sim import grid
from sglang_hybrid.sim.answer import paragraph
from sglang_hybrid.sim.metrics import Outcome
from sglang_hybrid.sim.report import Report


def outcome(policy: str, rate: float, gb: float = 1.0, **fields: Any) -> Outcome:
    return Outcome("t", "m", policy, gb, {"token_hit_rate": rate, **fields})


def grid_of(*rates: tuple[float, float, float], endless: float = 0.6, **fields: Any) -> list[Outcome]:
    """Per capacity: GB, then the rates of lru and forecast, with all ceilings."""
    cells = []
    for gb, lru, forecast in rates:
        cells += [outcome("lru", lru, gb, **fields), outcome("forecast", forecast, gb, **fields)]
        cells += [outcome("clairvoyant", 0.58, gb), outcome("bound", 0.59, gb), outcome("unbounded", endless, gb)]
    return cells


def test_the_knee_is_the_smallest_capacity_with_95_percent_of_endless_memory() -> None:
    said = paragraph(grid_of((1, 0.3, 0.4), (2, 0.5, 0.57), (4, 0.58, 0.58)))
    assert "Endless memory, with a state at every position, would serve 60.0 % of the input tokens" in said
    assert "2 GB is enough for 95 % of that: it gives 57.0 % with forecast." in said
    assert "At 2 GB a cache that knows the future gets 58.0 %, and no cache can get more than 59.0 %." in said
    assert "1 GB, the smallest one tried, is enough" in paragraph(grid_of((1, 0.59, 0.58)))
    said = paragraph(grid_of((1, 0.3, 0.4), (2, 0.5, 0.56)))
    assert "No capacity tried gives 95 % of that; the largest, 2 GB, gives 56.0 % with forecast." in said


def test_ties_are_named_and_a_ceiling_never_wins() -> None:
    said = paragraph(grid_of((1, 0.3, 0.4), (2, 0.5, 0.50001), (4, 0.5, 0.5)))
    assert "Best policy: forecast at 1 GB; forecast and lru alike at 2 and 4 GB." in said


def test_what_more_memory_brings() -> None:
    said = paragraph(grid_of((1, 0.3, 0.4), (2, 0.5, 0.55), all_fits=False))
    assert "From 1 to 2 GB the best hit rate moves by +15.0 points." in said
    assert "More memory than 2 GB can bring at most 5.0 points." in said
    said = paragraph(grid_of((2, 0.5, 0.55), all_fits=True, states=3))
    assert "At 2 GB forecast evicts nothing: more memory brings nothing. The other 5.0 points" in said
    assert "cache_boundaries" in said
    assert "cache_boundaries" not in paragraph(grid_of((2, 0.5, 0.55), all_fits=True, states=0))


def test_how_states_and_kv_split_where_the_knee_is() -> None:
    cells = grid_of((1, 0.58, 0.3), states=3, states_gb=0.3, kv_gb=0.1)
    assert "lru holds 3 states of 0.30 GB together and 0.10 GB of KV: states are 75 % of the bytes." in paragraph(cells)


def test_what_was_not_computed_is_not_said() -> None:
    said = paragraph([outcome("lru", 0.5), outcome("forecast", 0.4)])
    assert "leave out --no-ceilings" in said
    assert not any(word in said for word in ("Endless", "knows the future", "states are", "95 %"))
    assert paragraph([outcome("bound", 0.9)]) == ""
    assert Report((outcome("bound", 0.9),)).answers() == []
    nothing = paragraph([outcome("lru", 0.0), outcome("unbounded", 0.0)])
    assert nothing.startswith("No request begins like an earlier one")


@pytest.mark.parametrize(("gb", "fits"), [(0.02, False), (50.0, True)])
def test_a_grid_knows_whether_all_fits_and_what_is_held(gb: float, fits: bool) -> None:
    model = preset("qwen3.5-35b-a3b")
    (cell,) = grid.cells([grid.Source("workload:sharegpt?seed=1&sessions=4")], [model], ["lru"], [gb])
    fields = grid.run_cell(cell).fields
    assert fields["all_fits"] is fits
    assert (fields["evictions"] == 0) is fits or not fits
    held = fields["states_gb"] + fields["kv_gb"]
    assert held <= gb
    assert fields["states_gb"] == round(fields["states"] * model.checkpoint_bytes / 1e9, 4)
    if fits:
        assert held == pytest.approx(fields["peak_gb"], abs=2e-4)  # nothing was evicted, so the end is the peak
