"""Requests for page-locked memory on a machine without an accelerator."""

import pytest
import torch

from sglang_hybrid.engine.cpu.pinning import Pageable, without_pinning


def pinned_work(value, *, times):
    indices = torch.tensor([value] * times, pin_memory=True).unsqueeze(1)
    mask = torch.ones(times, dtype=torch.bool).pin_memory()
    return indices.to("cpu", non_blocking=True).squeeze(1)[mask.to(device="cpu", non_blocking=True)]


def test_the_wrapped_call_gets_ordinary_memory():
    assert without_pinning(pinned_work, 7, times=3).tolist() == [7, 7, 7]


def test_what_it_allocates_is_not_pinned():
    with Pageable():
        assert not torch.empty(2, pin_memory=True).is_pinned()
        assert torch.tensor([2], pin_memory=False).item() == 2


def test_an_error_inside_leaves_nothing_behind():
    def fail():
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        without_pinning(fail)
    assert torch.overrides._get_current_function_mode() is None
