"""Strided tensors in place of dense ones, argument by argument: the same result, or an error that says what to do."""

import copy
import importlib
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid_kernels import dispatch
from tests.kernels.calls import CALLS


def arguments(call: str) -> list[str]:
    """Names of the call's tensor arguments; lists of tensors are one argument."""
    return [name for name, x in CALLS[call][1].items() if isinstance(x, Tensor | list)]


def poisoned(x: Tensor, *shape: int) -> Tensor:
    """A buffer whose values make every result wrong that reads them. Integers stay valid indices."""
    return x.new_full(shape, torch.nan if x.is_floating_point() else 0)


def every_second(x: Tensor, dim: int) -> Tensor:
    """The same tensor with a stride of two steps in one dimension."""
    shape = list(x.shape)
    shape[dim] *= 2
    view = poisoned(x, *shape).unflatten(dim, (x.shape[dim], 2)).select(dim + 1, 0)
    return view.copy_(x)


def from_the_back(x: Tensor) -> Tensor:
    """The same tensor with its dimensions in the opposite order of memory."""
    order = list(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    for dim in range(x.dim()):
        yield f"every second of dimension {dim}", every_second(x, dim)
    if x.dim() > 1:
        yield "dimensions in the opposite order", from_the_back(x)


def strided_calls(call: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The call's arguments with every layout of one of them."""
    given = CALLS[call][1]
    value = given[name]
    tensors = value if isinstance(value, list) else [value]
    for several in zip_longest(*(layouts(x) for x in tensors)):
        layout = next(made[0] for made in several if made)
        replaced = [x.clone() if made is None else made[1] for made, x in zip(several, tensors, strict=True)]
        yield layout, {**copy.deepcopy(given), name: replaced if isinstance(value, list) else replaced[0]}


def outcome(result: Any, given: dict[str, Any]) -> list[Tensor]:
    """What was returned, and what all tensor arguments hold after the call."""
    returned = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    lists = [x if isinstance(x, list) else [x] for x in given.values() if isinstance(x, Tensor | list)]
    return returned + [x for some in lists for x in some]


def outside(x: Tensor) -> Tensor:
    """What the storage holds outside the view."""
    everything = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    seen = torch.zeros_like(everything, dtype=torch.bool)
    seen.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return everything[~seen]


def naive(call: str) -> list[Tensor]:
    module, _, name = CALLS[call][0].partition(":")
    function = getattr(importlib.import_module(f"sglang_hybrid_kernels.{module}"), name or module)
    given = copy.deepcopy(CALLS[call][1])
    return outcome(function(**given), given)


def test_every_operation_is_varied():
    assert {operation.partition(":")[0] for operation, _ in CALLS.values()} == set(dispatch.operations())


@pytest.mark.parametrize("call", CALLS)
def test_dense_calls_agree(interpreted: Any, call: str):
    """So that the next test's differences are those of strides. Each call writes something."""
    given = copy.deepcopy(CALLS[call][1])
    got = outcome(interpreted(CALLS[call][0], **given), given)
    for a, b in zip(got, naive(call), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    before = outcome(None, CALLS[call][1])
    assert len(got) > len(before) or any(not torch.equal(a, b) for a, b in zip(got, before, strict=True))


@pytest.mark.parametrize(("call", "name"), [(call, name) for call in CALLS for name in arguments(call)])
def test_strided_is_dense_or_refused(interpreted: Any, call: str, name: str):
    wanted, computed = naive(call), 0
    for layout, given in strided_calls(call, name):
        try:
            result = interpreted(CALLS[call][0], **given)
        except ValueError as error:
            if "contiguous" not in str(error):
                raise
            continue
        computed += 1
        for a, b in zip(outcome(result, given), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda text, at=layout: f"{at}: {text}")
        for x in given[name] if isinstance(given[name], list) else [given[name]]:
            left = outside(x)
            assert bool((left.isnan() if x.is_floating_point() else left == 0).all()), layout
    assert computed
