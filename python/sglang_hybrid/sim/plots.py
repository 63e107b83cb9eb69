"""Plots of a report: hit rate against capacity, one panel per trace and model, ceilings dashed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.sim.grid import CEILINGS
from sglang_hybrid.sim.outputs import check_output
from sglang_hybrid.sim.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_hit_rates(report: Report, path: Path, dpi: int = 80) -> None:
    """Write a PNG; raises ConfigError when matplotlib is missing or there is nothing to draw."""
    pyplot = load_pyplot()
    panels = list(dict.fromkeys((o.trace, o.model) for o in report.outcomes))
    if not panels:
        raise ConfigError(f"a plot needs at least one outcome, got {len(panels)}")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.4 * rows), squeeze=False)
    for axis, (trace, model) in zip(axes.flat, panels, strict=False):
        _draw(axis, report, trace, model)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)


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


def _draw(axis: "Axes", report: Report, trace: str, model: str) -> None:
    mine = [o for o in report.outcomes if (o.trace, o.model) == (trace, model)]
    for policy in dict.fromkeys(o.policy for o in mine):
        points = sorted((o.capacity_gb, 100 * o.token_hit_rate) for o in mine if o.policy == policy)
        ceiling = policy in CEILINGS
        axis.plot(
            [gb for gb, _ in points],
            [rate for _, rate in points],
            label=policy,
            marker=None if ceiling else "o",
            markersize=3,
            linewidth=1.0 if ceiling else 1.6,
            linestyle="--" if ceiling else "-",
            color=_CEILING_COLOURS.get(policy),
        )
    axis.set_title(f"{trace}\n{model}", fontsize=8)
    axis.set_xlabel("capacity, GB", fontsize=8)
    axis.set_ylabel("token hit rate, %", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


_CEILING_COLOURS = {"clairvoyant": "0.25", "bound": "0.5", "unbounded": "0.75"}
