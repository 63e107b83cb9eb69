"""SGLang's Triton kernels of a verification on states that lie apart, as those of elastic memory do, under Triton's
interpreter: `test_speculation.py` runs this process.

Everything has to be as with states side by side, and what lies between them has to stay as it was. Prints the largest
difference of each kernel.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from typing import Any

import torch

from sglang_hybrid.engine import cpu

REQUESTS, STEPS, SLOTS, LAYERS = 3, 4, 7, 2
HEADS, SIZE, CHANNELS, WINDOW = 2, 16, 32, 3
BETWEEN = 48
"""Elements from the end of one slot to the begin of the next, where other layers have theirs."""


class OnGpu(torch.Tensor):
    """What a function takes that asks for a GPU."""

    is_cuda = True


def apart(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`states` [layers, slots, ...], all layers of a slot side by side; and the memory they lie in."""
    layers, slots, *shape = states.shape
    row = states[0, 0].numel()
    memory = torch.full((slots, layers * row + BETWEEN), 7.0)
    inner = [torch.Size(shape[i + 1 :]).numel() for i in range(len(shape))]
    view = memory.as_strided(states.shape, (row, layers * row + BETWEEN, *inner))
    view.copy_(states)
    return view, memory


def delta_rule() -> Any:
    """SGLang's kernel, which has moved."""
    for room in ("linear", "fla"):
        name = f"sglang.kernels.ops.attention.{room}.fused_sigmoid_gating_recurrent"
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name).fused_sigmoid_gating_delta_rule_update
    raise ImportError("SGLang's recurrent delta rule")


def both(run: Any, states: torch.Tensor) -> float:
    """The largest difference between what `run` leaves side by side and apart, memory between slots included."""
    together, (view, memory) = states.clone(), apart(states)
    worst = max(float((a - b).abs().max()) for a, b in zip([*run(together), together], [*run(view), view], strict=True))
    return max(worst, float((memory[:, -BETWEEN:] - 7.0).abs().max()))


def main() -> int:
    from tests.kernels.interpreter import compute_like_a_gpu

    compute_like_a_gpu()
    torch.cpu.device = lambda _: contextlib.nullcontext()  # type: ignore[attr-defined]  # as other devices have it
    cpu.install()
    from sglang.kernels.ops.mamba import causal_conv1d_triton, mamba_state_scatter_triton
    from sglang.kernels.ops.mamba.triton_ops import mamba_ssm

    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    tokens, rows = REQUESTS * STEPS, torch.arange(REQUESTS, dtype=torch.int32)
    slots = torch.tensor([5, 0, 2], dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 0, 1]] * REQUESTS, dtype=torch.int32)
    q, k, v = draw(1, tokens, HEADS, SIZE), draw(1, tokens, HEADS, SIZE), draw(1, tokens, HEADS, SIZE)
    a, b, bias, decay = draw(tokens, HEADS), draw(tokens, HEADS), draw(HEADS), draw(HEADS)
    update, tree = delta_rule(), {"retrieve_parent_token": parents}

    def verify(pool: torch.Tensor, **more: Any) -> list[torch.Tensor]:
        kept = torch.zeros(REQUESTS, STEPS, HEADS, SIZE, SIZE)
        out = update(
            A_log=decay, a=a, dt_bias=bias, softplus_beta=1.0, softplus_threshold=20.0, q=q, k=k, v=v, b=b,
            initial_state_source=pool[1], initial_state_indices=slots, use_qk_l2norm_in_kernel=True,
            cu_seqlens=torch.arange(0, tokens + 1, STEPS, dtype=torch.int32), disable_state_update=True,
            intermediate_states_buffer=kept, intermediate_state_indices=rows, cache_steps=STEPS, **more,
        )  # fmt: skip
        return [out, kept]

    def mamba2(pool: torch.Tensor) -> list[torch.Tensor]:
        kept, out = torch.zeros(REQUESTS, STEPS, HEADS, SIZE, SIZE), torch.zeros(REQUESTS, STEPS, HEADS, SIZE)
        shared = [t.reshape(REQUESTS, STEPS, HEADS, SIZE) for t in (q, k, v)]
        shape = {"state_batch_indices": slots, "intermediate_state_indices": rows, "cache_steps": STEPS}
        mamba_ssm.selective_state_update(
            pool[1], shared[0], a.reshape(REQUESTS, STEPS, HEADS, 1).expand(-1, -1, -1, SIZE),
            -decay.abs()[:, None, None].expand(-1, SIZE, SIZE), shared[1], shared[2], dt_softplus=True,
            dt_bias=bias[:, None].expand(-1, SIZE), D=bias[:, None].expand(-1, SIZE), out=out,
            disable_state_update=True, intermediate_states_buffer=kept, **shape,
        )  # fmt: skip
        return [out, kept]

    x, weight = draw(REQUESTS, CHANNELS, STEPS), draw(CHANNELS, WINDOW + 1)

    def convolve(pool: torch.Tensor) -> list[torch.Tensor]:
        kept = torch.zeros(REQUESTS, STEPS, CHANNELS, WINDOW)
        out = causal_conv1d_triton.causal_conv1d_update(
            x.clone(), pool[1], weight, None, "silu", conv_state_indices=slots, intermediate_conv_window=kept,
            intermediate_state_indices=rows,
        )  # fmt: skip
        return [out, kept]

    kept, accepted = draw(LAYERS, REQUESTS, STEPS, HEADS, SIZE, SIZE), torch.tensor([2, -1, 0], dtype=torch.int32)

    def commit(pool: torch.Tensor) -> list[torch.Tensor]:
        mamba_state_scatter_triton.fused_mamba_state_scatter_with_mask(pool.as_subclass(OnGpu), kept, slots, accepted)
        assert torch.equal(pool[:, 5], kept[:, 0, 2]), "the state of the accepted token"
        return []

    pool, windows = draw(LAYERS, SLOTS, HEADS, SIZE, SIZE), draw(LAYERS, SLOTS, CHANNELS, WINDOW)
    worst = {
        "chain": both(verify, pool),
        "tree": both(lambda each: verify(each, **tree), pool),
        "Mamba-2": both(mamba2, pool),
        "windows": both(convolve, windows),
        "commit": both(commit, pool),
    }
    print(*worst.values())  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
