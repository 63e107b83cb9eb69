"""Plots: every curve can be seen, the legend covers nothing, and the title says what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sglang_hybrid.sim import plots
from sglang_hybrid.sim.grid import CEILINGS
from sglang_hybrid.sim.metrics import Outcome
from sglang_hybrid.sim.report import Report
from tests.unit.sim.test_answer import outcome

RATES = {"lru": (0.10, 0.30), "forecast": (0.12, 0.42), "bound": (0.5, 0.6), "clairvoyant": (0.4, 0.5)}


def outcomes(rates: dict[str, Sequence[float]], capacities: Sequence[float] = (1.0, 16.0)) -> list[Outcome]:
    return [
        replace(outcome(policy, rate), capacity_gb=gb)
        for policy, each in rates.items()
        for gb, rate in zip(capacities, each, strict=True)
    ]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        (RATES, "forecast hits 12.0 points more than LRU at 16 GB"),
        ({"lru": (0.1, 0.3), "forecast": (0.1, 0.302)}, "No policy hits more than LRU, whatever the memory"),
        ({"lru": (0.2, 0.3), "marconi": (0.1, 0.25)}, "LRU hits most: 5.0 points more than marconi at 16 GB"),
        ({"forecast": (0.1, 0.4)}, "forecast hits 40.0 % at 16 GB"),
        ({"bound": (0.5, 0.7)}, "No policy can hit more than 70.0 %"),
    ],
)
def test_the_title_says_the_finding(rates: dict[str, Sequence[float]], said: str) -> None:
    assert plots.finding(outcomes(rates)) == said


@pytest.mark.parametrize("panels", [1, 2, 5])
def test_the_legend_is_outside_of_every_panel(panels: int) -> None:
    rows = [
        replace(o, trace=f"{'a long name of a trace ' * 4}{number}")
        for number in range(panels)
        for o in outcomes(RATES)
    ]
    figure = plots.draw(Report(tuple(rows)))
    figure.canvas.draw()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(RATES)
    box = legend.get_window_extent()
    drawn = [axis for axis in figure.axes if axis.get_visible()]
    assert len(drawn) == panels
    for axis in drawn:
        assert axis.get_legend() is None
        assert not box.overlaps(axis.get_tightbbox())
        assert axis.get_title(loc="left").startswith("forecast hits 12.0 points")


def test_capacities_stand_at_equal_ratios_and_by_their_names() -> None:
    capacities = [float(2**n) for n in range(12)]
    (axis,) = plots.draw(Report(tuple(outcomes({"lru": [0.1] * 12}, capacities)))).axes
    assert axis.get_xscale() == "log"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "4", "16", "64", "256", "1024"]


def test_every_curve_has_marks_for_one_capacity_draws_no_line() -> None:
    (axis,) = plots.draw(Report(tuple(outcomes({name: each[:1] for name, each in RATES.items()}, [4.0])))).axes
    marks = {line.get_label(): line.get_marker() for line in axis.get_lines()}
    assert set(marks) == set(RATES)
    assert "None" not in marks.values()
    assert len({marks[name] for name in RATES if name in CEILINGS}) == 2
    assert set(plots.MARKS) == set(CEILINGS)
