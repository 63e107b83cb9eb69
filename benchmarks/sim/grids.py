"""The grids behind the tables and figures of this folder: names and cells, nothing else."""

from collections.abc import Iterable, Sequence

from benchmarks.sim.models import LAYER_MIXES, MARCONI, STATE_SIZES
from sglang_hybrid.core.spec import ModelSpec, preset
from sglang_hybrid.sim.grid import Cell, Source, cells

ALPHAS = ("marconi:0", "marconi:0.5", "marconi:1")
CEILINGS = ("clairvoyant", "bound", "unbounded")
CAPACITIES = {
    "sharegpt": (1.0, 2.0, 5.0),
    "lmsys": (2.0, 3.0, 5.0),
    "agentic": (20.0, 40.0, 60.0),
    "swebench": (10.0, 20.0, 40.0),
    "fewshot": (1.0, 2.0, 3.0),
    "rag": (2.0, 5.0),
}
HELD_OUT_SEEDS = (101, 102, 201, 202, 203, 204)  # no policy was designed or tuned on these


def _grid(
    workloads: Iterable[str], policies: Sequence[str], gbs: Sequence[float], model: ModelSpec = MARCONI
) -> list[Cell]:
    return cells([Source(f"workload:{w}") for w in workloads], [model], policies, gbs)


def main() -> list[Cell]:
    """Every workload at three capacities and six held-out seeds, all policies, best hindsight alpha, ceilings."""
    policies = ("lru", "superseded", "marconi", "marconi-paper", *ALPHAS, "forecast", *CEILINGS)
    found = []
    for seed in HELD_OUT_SEEDS:
        for name, gbs in CAPACITIES.items():
            found += _grid([f"{name}?seed={seed}"], policies, gbs)
    return found


def robustness() -> list[Cell]:
    """Heavy-tailed gaps, mixed tenants, phase changes, other session rates: never far below LRU."""
    policies = ("lru", "superseded", "marconi", "forecast", "clairvoyant", "bound")
    cases: dict[str, Sequence[float]] = {
        "mixed?": (10.0, 20.0),
        "phases?": (5.0, 15.0),
        "turnover?": (4.0, 9.0),
        "turnover?sessions=40&documents=20&": (4.0, 9.0),
        "sharegpt?gap_sigma=1.5&": (1.0, 2.0, 5.0),
        "lmsys?gap_sigma=1.5&": (3.0, 10.0),
        "agentic?gap_sigma=1.5&": (20.0, 40.0),
        "swebench?gap_sigma=1.5&": (20.0,),
        "sharegpt?sps=0.25&": (1.0, 2.0),
        "sharegpt?sps=5&": (1.0, 2.0),
        "lmsys?sps=0.25&": (3.0,),
        "agentic?sps=0.25&": (20.0,),
    }
    found = []
    for seed in (111,):
        for case, gbs in cases.items():
            found += _grid([f"{case}seed={seed}"], policies, gbs)
    return found


def short() -> list[Cell]:
    """Traces of a hundred requests or two: what a policy that learns loses before it has learnt."""
    cases: dict[str, Sequence[float]] = {
        "lmsys?sessions=8&": (0.5, 1.0),
        "sharegpt?sessions=12&": (0.25, 0.5),
        "agentic?sessions=8&": (2.0, 4.0),
        "fewshot?requests=200&": (0.5, 1.0),
    }
    found = []
    for seed in (161, 162, 163):
        for case, gbs in cases.items():
            names = [f"{case}seed={seed}"]
            found += _grid(names, ("lru", "superseded", "marconi", "forecast", "clairvoyant", "bound"), gbs)
    return found


def long() -> list[Cell]:
    """A trace of more than 5,000 requests and 60 million tokens: seconds per replay."""
    return _grid(
        ["agentic?sessions=210&seed=171"], ("lru", "superseded", "marconi:0.5", "marconi", "forecast"), (40.0,)
    )


def admission() -> list[Cell]:
    """Figure 7 and 8: fine-grained checkpointing (vLLM+), SGLang+ (lru), Marconi and ours over rates and capacities."""
    policies = ("vllm+", "lru", "marconi", "forecast")
    found = []
    for sps in (0.5, 2.0):
        found += _grid([f"sharegpt?sps={sps}&seed=121"], policies, (1.0, 2.0, 4.0))
        found += _grid([f"lmsys?sps={sps}&sessions=50&seed=121"], policies, (1.0, 2.0, 4.0))
        found += _grid([f"swebench?sps={sps}&sessions=25&seed=121"], policies, (4.0, 8.0))
    return found


def contention() -> list[Cell]:
    """Figure 11: capacity from high to low contention, agents that append; Figure 10 reads one of these cells."""
    return _grid(["agentic?seed=131"], ("lru", "marconi", "forecast", "clairvoyant"), (15.0, 30.0, 45.0, 60.0, 75.0))


def architecture() -> list[Cell]:
    """Figure 12: layer mixes and state dimensions at one capacity."""
    found = []
    for model in (*LAYER_MIXES.values(), *STATE_SIZES.values()):
        found += _grid(["agentic?sessions=30&seed=141"], ("vllm+", "lru", "marconi", "forecast"), (12.0,), model)
    return found


def arrivals() -> list[Cell]:
    """Figure 13: sessions a second, and seconds between the requests of a session."""
    names = [f"agentic?sps={sps}&seed=151" for sps in (0.5, 1.0, 2.0)]
    names += [f"agentic?art={art}&seed=151" for art in (5.0, 7.5, 10.0)]
    return _grid(names, ("lru", "marconi", "forecast"), (40.0,))


def shifts() -> list[Cell]:
    """Phases whose past misleads; held-out seeds, one budget and two pools, with gaps that tell nothing as well."""
    one = ("lru", "marconi", "forecast-unguarded", "forecast", "clairvoyant", "bound")
    two = tuple(f"pools:{name}" for name in ("lru", "marconi-online", "forecast-unguarded", "forecast"))
    plain = ("hotcold", "flips", "scans", "loops", "alternating", "drifts", "bursts", "shifting")
    cases = [f"{name}?" for name in plain]
    cases += [f"{name}?question_tokens=0&" for name in ("hotcold", "alternating", "scans")]
    cases += [f"{name}?tick_s=1000000000&" for name in ("hotcold", "drifts", "shifting")]
    found = []
    for seed in HELD_OUT_SEEDS[:3]:
        for case in cases:
            found += _grid([f"{case}seed={seed}"], (*one, *two), (1.0,))
        for case in ("hotcold?cold=30&cycles=1&", "alternating?", "shifting?"):  # 24 states, KV in plenty
            found += _grid([f"{case}question_tokens=0&seed={seed}"], (*one, *two), (4.5,), preset("qwen3-next-80b-a3b"))
    return found


SAID = ("hints=1", "hints=1&error=0.5", "hints=0.5", "hints=1&wrong=0.2", "hints=1&wrong=0.5", "hints=1&wrong=1")
SAID += ("hints=1&random=1",)


def hints() -> list[Cell]:
    """Clients that say what follows upon their requests: the truth, about that, half of them, and what is not true."""
    found = []
    for name, seeds in (("sharegpt", 4), ("lmsys", 4), ("agentic", 1)):
        for seed in HELD_OUT_SEEDS[:seeds]:
            source = f"{name}?seed={seed}"
            found += _grid([source], ("lru", "marconi-paper", "forecast", "clairvoyant", "bound"), CAPACITIES[name])
            found += _grid([f"{source}&{said}" for said in SAID], ("forecast",), CAPACITIES[name])
    return found


def tuner() -> list[Cell]:
    """The cells of the published artifact's comparison: what our Marconi tuner chooses there."""
    cases = {"sharegpt?": 2.0, "lmsys?sessions=50&": 2.0, "fewshot?": 2.0, "agentic?sessions=25&": 8.0}
    found = []
    for case, gb in cases.items():
        found += _grid([f"{case}seed=101"], ("lru", "marconi", *ALPHAS, "forecast"), (gb,))
    return found


GRIDS = {
    "hints": hints,
    "main": main,
    "robustness": robustness,
    "short": short,
    "long": long,
    "admission": admission,
    "contention": contention,
    "architecture": architecture,
    "arrivals": arrivals,
    "shifts": shifts,
    "tuner": tuner,
}
