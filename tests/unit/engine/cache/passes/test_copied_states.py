"""States that a pass resumes from are copied some at a time where SGLang's copy runs: it holds them once more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.engine.cache.passes import kernels
from tests.unit.engine.peak import Peak

MIB = 1 << 20


def original(held: Any, source: torch.Tensor, destination: torch.Tensor) -> None:
    """MambaPool.copy_from."""
    for tensor in (*held.mamba_cache.conv, held.mamba_cache.temporal):
        tensor[:, destination] = tensor[:, source]


def pool(device: str, layers: int, slots: int, state: tuple[int, ...], window: tuple[int, ...]) -> Any:
    cache = SimpleNamespace(
        conv=[torch.zeros(layers, slots, *window, dtype=torch.bfloat16, device=device)],
        temporal=torch.zeros(layers, slots, *state, device=device),
    )
    return SimpleNamespace(mamba_cache=cache)


def test_many_second_turns_in_one_pass_hold_a_few_states_more() -> None:
    """Of Qwen3-Next-80B-A3B on one rank."""
    held = pool("meta", 36, 300, (32, 128, 128), (8192, 3))
    slots = torch.empty(160, dtype=torch.int64, device="meta")
    with Peak() as peak:
        kernels.copy(original, held, slots[:80], slots[80:])
    assert 0 < peak.bytes <= 300 * MIB, f"{peak.bytes / MIB:.0f} MiB"


@pytest.mark.parametrize("at_once", [1, 3, 4, 100])
def test_every_state_is_copied(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ours", lambda _: False)
    held = pool("cpu", 2, 20, (2, 4, 4), (6, 3))
    slot_bytes = 2 * (2 * 4 * 4 * 4 + 6 * 3 * 2)
    monkeypatch.setattr(kernels, "_HELD_BYTES", at_once * slot_bytes)
    tensors = (held.mamba_cache.temporal, *held.mamba_cache.conv)
    for tensor in tensors:
        tensor.copy_(torch.arange(20).view(1, 20, *[1] * (tensor.dim() - 2)).expand_as(tensor))
    source, destination = torch.tensor([3, 1, 9, 3, 5, 7, 2]), torch.tensor([10, 18, 12, 13, 14, 19, 16])
    calls: list[int] = []

    def counted(given: Any, some: torch.Tensor, into: torch.Tensor) -> None:
        calls.append(len(some))
        original(given, some, into)

    kernels.copy(counted, held, source, destination)
    expected = torch.arange(20)
    expected[destination] = source
    for tensor in tensors:
        assert torch.equal(tensor, expected.view(1, 20, *[1] * (tensor.dim() - 2)).expand_as(tensor).to(tensor.dtype))
    assert max(calls) == min(at_once, 7)
