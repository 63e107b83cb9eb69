"""The paper's comparisons, redrawn from our raw JSON: results/figures/*.png (Figures 7, 8, 10, 11, 12, 13).

python -m benchmarks.sim.figures
"""

from typing import Any

import matplotlib as mpl

from benchmarks import provenance
from benchmarks.sim.tables import HERE, groups, result, workload
from sglang_hybrid.sim.metrics import Outcome
from sglang_hybrid.sim.plots import MARKS, capacity_axis, finding, legend_below

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OUT = HERE / "results" / "figures"
LABELS = {"vllm+": "vLLM+ (every 32)", "lru": "SGLang+ (LRU)", "marconi": "Marconi", "forecast": "forecast (ours)"}
COLOURS = {"vllm+": "0.6", "lru": "tab:blue", "marconi": "tab:orange", "forecast": "tab:green", "clairvoyant": "0.25"}


def save(figure: Figure, name: str) -> None:
    """Write a small PNG."""
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT / f"{name}.png", dpi=80)
    plt.close(figure)


def figure_7_8() -> None:
    """Admission (against vLLM+) and eviction (against LRU): ratios over rates and capacities, one box per workload."""
    ratios: dict[str, dict[str, list[float]]] = {"vllm+": {}, "lru": {}}
    ours: dict[str, dict[str, list[float]]] = {"vllm+": {}, "lru": {}}
    for trace, _, rates, _ in groups(result("admission")["rows"]):
        for base in ratios:
            ratios[base].setdefault(workload(trace), []).append(rates["marconi"] / max(rates[base], 1e-3))
            ours[base].setdefault(workload(trace), []).append(rates["forecast"] / max(rates[base], 1e-3))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.7), layout="constrained")
    for axis, base, title in zip(
        axes, ratios, ("Fig. 7: token hit rate / vLLM+", "Fig. 8: token hit rate / SGLang+"), strict=True
    ):
        names = list(ratios[base])
        for offset, values, policy in ((-0.18, ratios, "marconi"), (0.18, ours, "forecast")):
            boxes = axis.boxplot(
                [values[base][n] for n in names], positions=[i + offset for i in range(len(names))], widths=0.3,
                patch_artist=True, medianprops={"color": "black"},
            )  # fmt: skip
            for box in boxes["boxes"]:
                box.set_facecolor(COLOURS[policy])
            axis.plot([], [], color=COLOURS[policy], linewidth=6, label=LABELS[policy])
        axis.set_xticks(range(len(names)), names)
        axis.axhline(1.0, color="0.4", linewidth=0.8)
        axis.set_title(title, fontsize=9)
    axes[0].set_yscale("log")
    legend_below(figure)
    save(figure, "fig7-8-admission-eviction")


def figure_10() -> None:
    """Hit rate by input length against LRU, and TTFT percentiles, on the append-only agents of Figure 11."""
    cells = [g for g in groups(result("contention")["rows"]) if g[1] == 45.0]
    rows = {r["policy"]: r for r in cells[0][3]}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    base = rows["lru"]["hit_rate_by_input_tokens"]
    for i, policy in enumerate(("marconi", "forecast")):
        mine = rows[policy]["hit_rate_by_input_tokens"]
        gain = [100 * (mine[b]["mean_hit_rate"] - base[b]["mean_hit_rate"]) for b in base]
        axes[0].bar(
            [x + 0.4 * i - 0.2 for x in range(len(base))], gain, 0.4, color=COLOURS[policy], label=LABELS[policy]
        )
    axes[0].set_xticks(range(len(base)), [f"<{(int(b.split('-')[1]) + 1) // 1000}K" for b in base], fontsize=7)
    axes[0].set_title("Fig. 10a: mean hit rate minus SGLang+, points, by input tokens", fontsize=8)
    for i, policy in enumerate(("lru", "marconi", "forecast")):
        ttft = rows[policy]["ttft_ms"]
        axes[1].bar([x + 0.27 * (i - 1) for x in range(3)], [ttft[q] for q in ("p5", "p50", "p95")], 0.27,
                    color=COLOURS[policy], label=LABELS[policy])  # fmt: skip
    axes[1].set_xticks(range(3), ["P5", "P50", "P95"])
    axes[1].set_title("Fig. 10b: estimated TTFT, ms (stated cost line)", fontsize=8)
    legend_below(figure)
    save(figure, "fig10-by-length")


def figure_11() -> None:
    """Hit rate against capacity, agents that append."""
    figure, axis = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    _lines(axis, result("contention")["rows"], "capacity_gb", ("lru", "marconi", "forecast", "clairvoyant"))
    axis.set_xlabel("capacity, GB")
    axis.set_title("Fig. 11: contention", fontsize=9)
    legend_below(figure)
    save(figure, "fig11-contention")


def figure_12() -> None:
    """Layer mixes and state dimensions."""
    by_model: dict[str, dict[str, float]] = {}
    for row in result("architecture")["rows"]:
        by_model.setdefault(row["model"], {})[row["policy"]] = 100 * row["token_hit_rate"]
    mixes = {"12a-24s-N128": "1:2", "7a-29s-N128": "1:4", "4a-32s-N128": "1:8", "36a-0s-N128": "attention"}
    states = {f"4a-24s-N{n}": f"N={n}" for n in (16, 32, 64, 128)}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, names, title in ((axes[0], mixes, "Fig. 12a: attention:SSM"), (axes[1], states, "Fig. 12b: state size")):
        for i, policy in enumerate(LABELS):
            heights = [by_model[m][policy] for m in names]
            axis.bar(
                [x + 0.2 * (i - 1.5) for x in range(len(names))],
                heights,
                0.2,
                color=COLOURS[policy],
                label=LABELS[policy],
            )
        axis.set_xticks(range(len(names)), list(names.values()))
        axis.set_title(f"{title}, token hit rate %", fontsize=9)
    legend_below(figure)
    save(figure, "fig12-architecture")


def figure_13() -> None:
    """Session arrival rate and time between requests."""
    rows = result("arrivals")["rows"]
    for row in rows:
        name, _, value = row["trace"].partition("#")[0].partition(",")[2].partition("=")
        row[name] = float(value)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, key, title in ((axes[0], "sps", "sessions a second"), (axes[1], "art", "seconds between requests")):
        _lines(axis, [r for r in rows if key in r], key, ("lru", "marconi", "forecast"))
        axis.set_xlabel(title)
        axis.set_title(f"Fig. 13: {title}", fontsize=9)
    legend_below(figure)
    save(figure, "fig13-arrivals")


def figure_main() -> None:
    """Hit rate against capacity of the main grid, ceilings dashed."""
    rows = result("main")["rows"]
    names = list(dict.fromkeys(workload(r["trace"]) for r in rows))
    figure, axes = plt.subplots(2, 3, figsize=(11, 6.4), layout="constrained")
    for axis, name in zip(axes.flat, names, strict=False):
        mine = [r for r in rows if workload(r["trace"]) == name]
        _lines(axis, mine, "capacity_gb", ("lru", "marconi", "forecast", "clairvoyant", "bound"))
        axis.set_title(f"{name}\n{finding(_means(mine))}", fontsize=8)
        axis.set_xlabel("capacity, GB")
    legend_below(figure)
    save(figure, "main")


def _means(rows: list[dict[str, Any]]) -> list[Outcome]:
    """One outcome per policy drawn and capacity, the mean over traces."""
    rates: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        if row["policy"] in COLOURS:
            rates.setdefault((row["policy"], row["capacity_gb"]), []).append(row["token_hit_rate"])
    return [Outcome("", "", name, gb, {"token_hit_rate": sum(of) / len(of)}) for (name, gb), of in rates.items()]


def _lines(axis: Axes, rows: list[dict[str, Any]], x: str, policies: tuple[str, ...]) -> None:
    for policy in policies:
        points: dict[float, list[float]] = {}
        for row in rows:
            if row["policy"] == policy:
                points.setdefault(row[x], []).append(100 * row["token_hit_rate"])
        xs = sorted(points)
        ceiling = policy in MARKS
        axis.plot(
            xs, [sum(points[v]) / len(points[v]) for v in xs],
            marker=MARKS[policy][0] if ceiling else "o", markersize=4, markerfacecolor="none" if ceiling else None,
            linestyle="--" if ceiling else "-",
            color=COLOURS.get(policy, "0.5"), label=LABELS.get(policy, policy),
        )  # fmt: skip
    axis.set_ylabel("token hit rate, %")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if x == "capacity_gb":
        capacity_axis(axis, sorted({row[x] for row in rows}))


if __name__ == "__main__":
    provenance.no_arguments(__doc__)
    for draw in (figure_main, figure_7_8, figure_10, figure_11, figure_12, figure_13):
        draw()
