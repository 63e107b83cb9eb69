"""state_verify and promotion: a tree of candidates in one linear layer, and the accepted state in all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.registry import MODELS, QWEN3_NEXT, Case, Model
from sglang_hybrid_kernels.state_verify import promote_path, promote_window, state_verify

DEPTH = 4


def _tree(requests: int, nodes: int, device: torch.device) -> Tensor:
    """Parents of a tree of DEPTH levels of equal width; node i of a level continues node i of the one above."""
    width = nodes // DEPTH
    parents = [max(-1, node - width) if node >= width else -1 for node in range(nodes)]
    return torch.tensor([parents] * requests, device=device)


def _verify_inputs(model: Model, requests: int, nodes: int, delta: bool) -> Any:
    def build(device: torch.device, generator: torch.Generator, small: bool) -> dict[str, Any]:
        n, heads, dim = 1 if small else requests, model.value_heads, model.head_dim

        def random(*shape: int) -> Tensor:
            return torch.randn(n, nodes, *shape, generator=generator, device=device)

        q, k = (torch.nn.functional.normalize(random(model.key_heads, dim), dim=-1).bfloat16() for _ in range(2))
        return {
            "q": q,
            "k": k,
            "v": random(heads, dim).bfloat16(),
            "g": -0.1 * random(heads).abs(),
            "beta": torch.sigmoid(random(heads)) if delta else None,
            "pool": torch.randn(n + 1, heads, dim, dim, generator=generator, device=device),
            "slots": torch.arange(1, n + 1, device=device),
            "parent": _tree(n, nodes, device),
            "scale": dim**-0.5,
        }

    return build


def _promote_inputs(model: Model, requests: int, nodes: int) -> Any:
    def build(device: torch.device, generator: torch.Generator, small: bool) -> dict[str, Any]:
        n, layers = (1, 2) if small else (requests, model.linear_layers)
        heads, dim = model.value_heads, model.head_dim

        def random(*shape: int) -> Tensor:
            return torch.randn(layers, *shape, generator=generator, device=device)

        return {
            "pool": random(n + 1, heads, dim, dim),
            "source": torch.arange(1, n + 1, device=device),
            "destination": torch.arange(1, n + 1, device=device),
            "k": torch.nn.functional.normalize(random(n, nodes, model.key_heads, dim), dim=-1).bfloat16(),
            "values": random(n, nodes, heads, dim),
            "g": -0.1 * random(n, nodes, heads).abs(),
            "parent": _tree(n, nodes, device),
            "accepted": torch.full((n,), nodes - 1, device=device),
        }

    return build


def _window_inputs(model: Model, requests: int, nodes: int) -> Any:
    def build(device: torch.device, generator: torch.Generator, small: bool) -> dict[str, Any]:
        n, layers = (1, 2) if small else (requests, model.linear_layers)
        pool = torch.randn(layers, n + 1, model.conv_channels, model.conv_width - 1, generator=generator, device=device)
        inputs = torch.randn(layers, n, nodes, model.conv_channels, generator=generator, device=device)
        return {
            "pool": pool.bfloat16(),
            "source": torch.arange(1, n + 1, device=device),
            "destination": torch.arange(1, n + 1, device=device),
            "inputs": inputs.bfloat16(),
            "parent": _tree(n, nodes, device),
            "accepted": torch.full((n,), nodes - nodes // DEPTH * 2 - 1, device=device),
        }

    return build


def _window(**inputs: Any) -> Tensor:
    promote_window(**inputs, check_slots=False)
    return inputs["pool"]


def _verify(**inputs: Any) -> tuple[Tensor, Tensor]:
    return state_verify(**inputs, check_slots=False)


def _sglang_verify(**inputs: Any) -> Tensor:
    """SGLang's tree verification: a state after every candidate goes to memory, children read it back."""
    pool, parent = inputs["pool"], inputs["parent"].clamp(min=0)  # its trees have one root, node 0
    requests, nodes = parent.shape
    states = torch.empty(requests, nodes, *pool.shape[1:], device=pool.device)
    rows = torch.arange(requests, device=pool.device, dtype=torch.int32)
    after = {"intermediate_states_buffer": states, "intermediate_state_indices": rows, "cache_steps": nodes}
    after |= {"retrieve_parent_token": parent, "disable_state_update": True}
    if inputs["beta"] is not None:
        from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_update_fwd

        return fused_recurrent_gated_delta_rule_update_fwd(
            *(inputs[name] for name in ("q", "k", "v", "g", "beta", "scale", "pool", "slots")), **after
        )
    from sglang.kernels.ops.mamba.triton_ops.mamba_ssm import selective_state_update

    out, (heads, dim, size) = torch.empty_like(inputs["v"]), pool.shape[1:]
    a = torch.full((heads, 1, 1), -1.0, device=pool.device).expand(heads, dim, size)  # one scalar per head
    dt = (-inputs["g"])[..., None].expand(requests, nodes, heads, dim)
    nothing = torch.zeros(heads, 1, device=pool.device).expand(heads, dim)
    given = (pool, inputs["v"], dt, a, inputs["k"], inputs["q"], nothing)
    selective_state_update(*given, dt_bias=nothing, state_batch_indices=inputs["slots"], out=out, **after)
    return out


def _promote(**inputs: Any) -> Tensor:
    promote_path(**inputs, check_slots=False)
    return inputs["pool"]


def _verify_case(model: Model, requests: int, nodes: int, delta: bool) -> Case:
    state = requests * model.value_heads * model.head_dim**2
    rows = requests * nodes * model.head_dim
    return Case(
        operation="state_verify",
        name=f"{model.name} {'delta' if delta else 'scalar'} requests={requests} nodes={nodes}",
        inputs=_verify_inputs(model, requests, nodes, delta),
        call=_verify,
        tolerance=2**-7,
        moved_bytes=4 * state + rows * (2 * 2 * model.key_heads + (2 + 2 + 4) * model.value_heads),
        flops=(4 if delta else 2) * state * nodes + 2 * rows * nodes * model.value_heads * (3 + delta),
        heads=(-2,),
        baselines={"SGLang, a state per candidate": _sglang_verify},
    )


def _promote_case(model: Model, requests: int, nodes: int) -> Case:
    state = requests * model.linear_layers * model.value_heads * model.head_dim**2
    rows = requests * model.linear_layers * DEPTH * model.head_dim
    return Case(
        operation="state_verify",
        name=f"{model.name} promote_path requests={requests} nodes={nodes}",
        inputs=_promote_inputs(model, requests, nodes),
        call=_promote,
        tolerance=1e-4,
        moved_bytes=2 * 4 * state + rows * (2 * model.key_heads + 4 * model.value_heads),
        flops=2 * state * DEPTH,
        heads=(-3,),
    )


def _window_case(model: Model, requests: int, nodes: int) -> Case:
    columns = requests * model.linear_layers * model.conv_channels
    return Case(
        operation="state_verify",
        name=f"{model.name} promote_window requests={requests} nodes={nodes}",
        inputs=_window_inputs(model, requests, nodes),
        call=_window,
        tolerance=0.0,
        moved_bytes=2 * 2 * columns * (model.conv_width - 1),
    )


CASES = [
    *(_verify_case(model, 16, 16, True) for model in MODELS),
    _verify_case(QWEN3_NEXT, 1, 64, True),
    _verify_case(QWEN3_NEXT, 16, 16, False),
    *(_promote_case(model, 16, 16) for model in MODELS),
    *(_window_case(model, 16, 16) for model in MODELS),
]
