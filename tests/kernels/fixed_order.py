"""PyTorch whose products and sums add their terms in the order of their indices, whatever the shape and the machine.

How a BLAS library adds depends on the processor, and for one and the same row on how many others there are and where
it stands; a vectorised sum depends on the column, and a function of strided memory may be another one than that of
contiguous memory. Two computations of the same number that ask the library differently may then differ in bits. Here
they do not, so equal bits say that the code adds the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a` [..., m, k] times `b` [..., k, n], from the first k to the last."""
    result = a.new_zeros(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    for k in range(a.shape[-1]):
        result += a[..., :, k : k + 1] * b[..., k : k + 1, :]
    return result


def added(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * c + alpha * product(a, b)


def total(
    x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum over `dim`, from the first element to the last."""
    dims = [d % x.dim() for d in (dim or range(x.dim()))]
    kept = [d for d in range(x.dim()) if d not in dims]
    rows = x.to(dtype or x.dtype).permute(*kept, *dims).flatten(len(kept)) if dims else x.unsqueeze(-1)
    result = rows.new_zeros(rows.shape[:-1])
    for column in rows.unbind(-1):
        result += column
    return result.view([1 if d in dims else x.shape[d] for d in range(x.dim())]) if keepdim else result


def mean(x: Tensor, dim: list[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    sums = total(x, dim, keepdim, dtype=dtype)
    return sums / (x.numel() // sums.numel())


def solved(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """x of a x = b by forward substitution, from the first row to the last."""
    if upper or not left:
        raise NotImplementedError("only lower triangular systems are solved here, from the left")
    x = b.expand(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *b.shape[-2:]).clone()
    for row in range(x.shape[-2]):
        x[..., row, :] -= product(a[..., row : row + 1, :row], x[..., :row, :])[..., 0, :]
        if not unitriangular:
            x[..., row, :] /= a[..., row, row, None]
    return x


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    weights = (x - x.amax(dim, keepdim=True)).contiguous().exp()
    return weights / total(weights, [dim], keepdim=True)


IN_ORDER: dict[Any, Callable[..., Tensor]] = {
    aten.mm: product,
    aten.bmm: product,
    aten.addmm: added,
    aten.baddbmm: added,
    aten.baddbmm_: lambda c, a, b, **scale: c.copy_(added(c, a, b, **scale)),
    aten.sum: total,
    aten.mean: mean,
    aten.linalg_solve_triangular: solved,
    aten._softmax: softmax,
}
ELEMENTWISE = {aten.exp, aten.exp2, aten.log, aten.rsqrt, aten.sigmoid, aten.silu, aten.softplus, aten.tanh}
IN_PLACE = {aten.exp_: aten.exp, aten.rsqrt_: aten.rsqrt, aten.sigmoid_: aten.sigmoid, aten.silu_: aten.silu}
ELSEWHERE = {
    aten.mv, aten.dot, aten.addmv, aten.addmv_, aten.addmm_, aten.addbmm, aten.convolution, aten.mkldnn_linear,
    aten._scaled_dot_product_flash_attention_for_cpu, aten.logsumexp, aten.triangular_solve, aten.prod,
}  # fmt: skip


class FixedOrder(TorchDispatchMode):
    """While entered, floating-point operations of this thread have the order described above."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kind, kwargs = func.overloadpacket, kwargs or {}
        if kind in ELSEWHERE:
            raise NotImplementedError(f"an operation without a fixed order, give it one here: {func}")
        if kind in IN_ORDER and args[0].is_floating_point():
            return IN_ORDER[kind](*args, **kwargs)
        if kind in ELEMENTWISE:
            return func(args[0].contiguous(), *args[1:], **kwargs)
        if kind in IN_PLACE:
            return args[0].copy_(IN_PLACE[kind](args[0].contiguous(), *args[1:], **kwargs))
        return func(*args, **kwargs)
