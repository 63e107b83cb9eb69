"""What equal bits are proven with: products and sums that depend on no neighbour, on no layout and on no machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.calls import randn
from tests.kernels.fixed_order import FixedOrder
from tests.kernels.interpreter import dot_in_order


def interpreter_dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.from_numpy(dot_in_order(a.numpy(), b.numpy()))


@pytest.mark.parametrize("dot", [torch.matmul, interpreter_dot], ids=["torch", "interpreter"])
@pytest.mark.parametrize("k", [1, 16, 67])
def test_a_row_of_a_product_has_the_same_bits_everywhere(fixed_order: None, dot: Callable[..., Any], k: int) -> None:
    a, b = randn(3, 20, k), randn(3, k, 24, seed=1)
    whole = dot(a, b)
    torch.testing.assert_close(whole.double(), (a.double()[..., None] * b.double()[:, None]).sum(2), atol=1e-4, rtol=0)
    for rows in (1, 2, 3, 4, 7, 8, 16):
        assert torch.equal(dot(a[:, :rows], b), whole[:, :rows])
        assert torch.equal(dot(a[:, -rows:].contiguous(), b), whole[:, -rows:])
        assert torch.equal(dot(a, b[..., :rows]), whole[..., :rows])
    assert torch.equal(dot(a[1], b[1]), whole[1])
    assert torch.equal(dot(a.mT.contiguous().mT, b.mT.contiguous().mT), whole)


def test_sums_and_solutions_have_the_same_bits_everywhere(fixed_order: None) -> None:
    x = randn(67, 37)
    assert torch.equal(x.sum(0)[36], x[:, 36].clone().sum(0))
    assert torch.equal(x.sum(-1, keepdim=True)[3], x[3].sum(-1, keepdim=True))
    assert torch.equal(x.mean(1), x.mT.contiguous().mean(0))
    torch.testing.assert_close(x.sum((0, 1)), x.double().sum().float(), atol=1e-4, rtol=0)
    a, b = randn(2, 3, 16, 16).tril(-1) * 0.3, randn(2, 3, 16, 5, seed=1)
    whole = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
    torch.testing.assert_close((a + torch.eye(16)) @ whole, b, atol=1e-4, rtol=0)
    assert torch.equal(torch.linalg.solve_triangular(a[1, 2], b[1, 2], upper=False, unitriangular=True), whole[1, 2])
    scaled = a + 2 * torch.eye(16)
    torch.testing.assert_close(scaled @ torch.linalg.solve_triangular(scaled, b, upper=False), b, atol=1e-4, rtol=0)
    torch.testing.assert_close(x.softmax(1), x.double().softmax(1).float(), atol=1e-6, rtol=0)
    assert torch.equal(x.softmax(1)[3], x[3].softmax(0))


def test_in_place_operations_write_where_they_did(fixed_order: None) -> None:
    a, b, c = randn(2, 3, 4), randn(2, 4, 5), randn(2, 5, 3).mT
    want = 0.5 * c + 2 * (a @ b)
    assert c.baddbmm_(a, b, beta=0.5, alpha=2) is c
    assert torch.equal(c, want)
    x = randn(4, 6)
    assert torch.equal(x.mT[1:].clone().mT.exp(), x.mT[1:].exp_().mT)
    assert torch.equal(x[:, 1:], randn(4, 6)[:, 1:].contiguous().exp())


def test_what_has_no_order_is_refused() -> None:
    with FixedOrder(), pytest.raises(NotImplementedError, match="without a fixed order"):
        torch.mv(randn(3, 4), randn(4))
    assert torch.mv(randn(3, 4), randn(4)).shape == (3,), "outside, PyTorch is as it was"
