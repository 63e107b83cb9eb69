"""Plots of a report: hit rate against capacity, one panel per trace and model, ceilings dashed."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.sim.grid import is_ceiling
from sglang_hybrid.sim.metrics import Outcome
from sglang_hybrid.sim.outputs import check_output
from sglang_hybrid.sim.report import Report
from sglang_hybrid.sim.segments.options import SUFFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORTH_SAYING = 0.005
"""Hit rates that differ by less than half a point are called alike."""

MARKS = {"clairvoyant": ("^", "0.25"), "bound": ("v", "0.5"), "unbounded": ("s", "0.7")}
"""Marker and grey of each ceiling: with one capacity there is no line to see."""
_MOST_TICKS = 8


def plot_hit_rates(report: Report, path: Path) -> None:
    """Write an image; raises ConfigError when matplotlib is missing or there is nothing to draw."""
    pyplot = load_pyplot()
    figure = draw(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw(report: Report) -> "Figure":
    """The figure; raises ConfigError when matplotlib is missing or there is nothing to draw."""
    pyplot = load_pyplot()
    panels = list(dict.fromkeys((o.trace, o.model) for o in report.outcomes))
    if not panels:
        raise ConfigError(f"a plot needs at least one outcome, got {len(panels)}")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (max(6.0, 4.6 * columns), 3.8 * rows + 0.4)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis, (trace, model) in zip(axes.flat, panels, strict=False):
        _draw(axis, [o for o in report.outcomes if (o.trace, o.model) == (trace, model)])
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    legend_below(figure)
    return figure  # type: ignore[no-any-return]


def legend_below(figure: "Figure") -> None:
    """One legend for all panels, below them: it covers nothing. The figure needs the layout 'constrained'."""
    shown = {label: line for axis in figure.axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=min(6, len(shown)), fontsize=8)


def capacity_axis(axis: "Axes", capacities: Sequence[float]) -> None:
    """A logarithmic axis of `capacities` in GB, ascending, that names up to eight of them."""
    axis.set_xscale("log")
    axis.set_xlim(capacities[0] / 1.3, capacities[-1] * 1.3)
    ticks = capacities[:: -(-len(capacities) // _MOST_TICKS)]
    axis.set_xticks(ticks, [f"{gb:g}" for gb in ticks])
    axis.set_xticks([], minor=True)


def finding(outcomes: Sequence[Outcome]) -> str:
    """What the outcomes of one trace and one model say, in one line."""
    policies = [o for o in outcomes if not is_ceiling(o.policy)]
    if not policies:
        best = max(outcomes, key=lambda o: o.token_hit_rate)
        return f"No policy can hit more than {100 * best.token_hit_rate:.1f} %"
    lru = {o.capacity_gb: o.token_hit_rate for o in policies if o.policy == "lru"}
    others = [o for o in policies if o.policy != "lru" and o.capacity_gb in lru]
    if not others:
        best = max(policies, key=lambda o: (o.token_hit_rate, -o.capacity_gb))
        return f"{best.policy} hits {100 * best.token_hit_rate:.1f} % at {best.capacity_gb:g} GB"

    def gain(outcome: Outcome) -> float:
        return outcome.token_hit_rate - lru[outcome.capacity_gb]

    best = max(others, key=gain)
    if gain(best) >= WORTH_SAYING:
        return f"{best.policy} hits {100 * gain(best):.1f} points more than LRU at {best.capacity_gb:g} GB"
    if gain(best) > -WORTH_SAYING:
        return "No policy hits more than LRU, whatever the memory"
    return f"LRU hits most: {-100 * gain(best):.1f} points more than {best.policy} at {best.capacity_gb:g} GB"


def load_pyplot() -> Any:
    """matplotlib.pyplot on a backend without a screen; raises ConfigError with the remedy when it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'sglang-hybrid[plot]', or leave out: --plot") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_plot(path: Path) -> None:
    """Raise ConfigError unless a plot can be drawn and written to `path`."""
    pyplot = load_pyplot()
    figure = pyplot.figure()
    kinds = sorted(figure.canvas.get_supported_filetypes())
    pyplot.close(figure)
    if path.suffix.removeprefix(".").lower() not in (*kinds, ""):
        raise ConfigError(f"a plot is one of {', '.join(kinds)}; choose another suffix: {path}")
    check_output(path)


def _draw(axis: "Axes", outcomes: Sequence[Outcome]) -> None:
    for policy in dict.fromkeys(o.policy for o in outcomes):
        points = sorted((o.capacity_gb, 100 * o.token_hit_rate) for o in outcomes if o.policy == policy)
        ceiling = is_ceiling(policy)
        mark, colour = MARKS.get(policy.removesuffix(SUFFIX), ("o", None)) if ceiling else ("o", None)
        axis.plot(
            [gb for gb, _ in points],
            [rate for _, rate in points],
            label=policy,
            marker=mark,
            markersize=5 if ceiling else 4,
            markerfacecolor="none" if ceiling else None,
            linewidth=1.0 if ceiling else 1.6,
            linestyle=(":" if policy.endswith(SUFFIX) else "--") if ceiling else "-",
            color=colour,
            zorder=1 if ceiling else 2,
        )
    capacity_axis(axis, sorted({o.capacity_gb for o in outcomes}))
    axis.set_title("\n".join(textwrap.wrap(finding(outcomes), 48)), fontsize=10, loc="left")
    where = f"{outcomes[0].trace}, {outcomes[0].model}"
    axis.set_xlabel("\n".join(["capacity, GB", *textwrap.wrap(where, 60)]), fontsize=8)
    axis.set_ylabel("prompt tokens from cache, %", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.set_ylim(bottom=0)
    axis.margins(y=0.08)
    axis.grid(alpha=0.3)
