"""The models of Marconi's Figure 12: the 7B hybrid with other layer mixes and state sizes, by its own formulas."""

from sglang_hybrid.core.spec import ModelSpec, preset


def hybrid(attention: int, ssm: int, mlp: int = 28, d: int = 4096, n: int = 128) -> ModelSpec:
    """`attention` + `ssm` sequence layers of width `d` and state dimension `n` (paper, appendix A; fp16)."""
    conv = ssm * (2 * d + 2 * n) * 4 * 2
    return ModelSpec(
        name=f"{attention}a-{ssm}s-N{n}",
        kv_bytes_per_token=attention * 2 * d * 2,
        checkpoint_bytes=ssm * d * n * 2 + conv,
        flops_per_token=attention * 8.0 * d * d + mlp * 16.0 * d * d + ssm * (12.0 * d * d + 16.0 * d * n + 10.0 * d),
        flops_per_token_pair=attention * 4.0 * d,
        conv_bytes=conv,
        context_tokens=32_768,
    )


MARCONI = preset("marconi-7b")
# 36 sequence layers: 1:2, 1:4, 1:8 and none.
LAYER_MIXES = {"1:2": hybrid(12, 24), "1:4": hybrid(7, 29), "1:8": hybrid(4, 32), "pure attention": hybrid(36, 0)}
STATE_SIZES = {n: hybrid(4, 24, n=n) for n in (16, 32, 64, 128)}
