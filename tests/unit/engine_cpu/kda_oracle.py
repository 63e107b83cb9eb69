"""Kimi delta attention beside SGLang's Triton kernels, under Triton's interpreter: `test_kda.py` runs this process.

What the CPU platform computes, and where a server's checkpoints are taken from, has to be what those kernels leave on a
GPU: outputs, final states, and the state at the start of every chunk in its order and orientation. Their products
are of bfloat16 numbers. Prints the largest difference of each.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from sglang_hybrid.engine import cpu

HEADS, SIZE = 2, 32


def only_the_first_configuration() -> None:
    """There is nothing to time under the interpreter."""
    from triton.runtime import autotuner

    original = autotuner.Autotuner.__init__

    def init(self: Any, fn: Any, names: Any, configs: Any, *rest: Any, **more: Any) -> None:
        original(self, fn, names, configs[:1], *rest, **more)

    autotuner.Autotuner.__init__ = init


def look_functions_up_late() -> None:
    """SGLang's modules took `tl.exp` and others at their import, before the interpreter puts its own in their place."""
    import triton.language as tl

    late = {name: (lambda x, name=name: getattr(tl, name)(x)) for name in ("exp", "exp2", "log", "log2")}
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.kernels.ops.attention.fla"):
            vars(module).update({key: call for key, call in late.items() if key in vars(module)})


def main() -> int:
    from tests.kernels.interpreter import compute_like_a_gpu

    compute_like_a_gpu()
    only_the_first_configuration()
    cpu.install()
    from sglang.kernels.ops.attention.fla import kda as theirs

    from sglang_hybrid.engine.cpu import kda as ours

    look_functions_up_late()
    rng, worst = torch.Generator().manual_seed(0), torch.zeros(4)
    for lengths, bound in (([130, 3, 64], None), ([70], -5.0)):
        tokens = sum(lengths)
        q, k, v, raw = (torch.randn(1, tokens, HEADS, SIZE, generator=rng) for _ in range(4))
        beta, bias = torch.randn(1, tokens, HEADS, generator=rng), torch.randn(HEADS * SIZE, generator=rng)
        pool = torch.randn(5, HEADS, SIZE, SIZE, generator=rng)
        results = []
        for chunk_kda in (theirs.chunk_kda, ours.chunk_kda):
            states, snapshot = pool.clone(), torch.zeros(len(lengths), HEADS, SIZE, SIZE)
            out, h = chunk_kda(
                q.clone(), k.clone(), v.clone(), raw.clone(), beta.sigmoid(), initial_state=states,
                initial_state_indices=torch.tensor([3, 0, 4], dtype=torch.int32)[: len(lengths)],
                use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
                A_log=torch.linspace(-3, 0.5, HEADS).view(1, 1, HEADS, 1), dt_bias=bias, lower_bound=bound,
                output_intermediate_states=True, track_state=snapshot,
                track_chunk_idx=torch.tensor([1, -1, 0], dtype=torch.int32)[: len(lengths)],
            )  # fmt: skip
            results.append((out, h, states, snapshot))
        worst = worst.maximum(torch.stack([(a - b).abs().max() for a, b in zip(*results, strict=True)]))
    print(*(f"{x:.6f}" for x in worst.tolist()))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
