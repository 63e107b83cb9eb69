"""The models of Marconi's Figure 12: the 7B hybrid with other layer mixes and state sizes, by its own formulas."""

from sglang_hybrid.core.spec import ModelSpec, marconi_hybrid, preset


def hybrid(attention: int, ssm: int, n: int = 128) -> ModelSpec:
    """`attention` and `ssm` sequence layers of state dimension `n`."""
    return marconi_hybrid(f"{attention}a-{ssm}s-N{n}", attention, ssm, n)


MARCONI = preset("marconi-7b")
# 36 sequence layers: 1:2, 1:4, 1:8 and none.
LAYER_MIXES = {"1:2": hybrid(12, 24), "1:4": hybrid(7, 29), "1:8": hybrid(4, 32), "pure attention": hybrid(36, 0)}
STATE_SIZES = {n: hybrid(4, 24, n=n) for n in (16, 32, 64, 128)}
