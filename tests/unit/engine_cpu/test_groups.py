"""Weights of Mamba-2 with one group on several ranks: B and C are copied, the rest is cut."""

from __future__ import annotations

import pytest
import torch

from sglang_hybrid.engine.cpu.groups import load_copies


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("trailing", [(), (1, 3)])
def test_each_rank_has_its_heads_and_the_whole_group(ranks: int, trailing: tuple[int, ...]) -> None:
    inner, group = 16, 3
    weight = torch.randn(inner + 2 * group, *trailing)
    x, b, c = weight.split([inner, group, group])
    shards = [(inner, 0, False), (ranks * group, (ranks - 1) * group, True), (ranks * group, (ranks - 1) * group, True)]
    for rank in range(ranks):
        loaded = torch.zeros(inner // ranks + 2 * group, *trailing)
        load_copies(lambda *_: pytest.fail("SGLang's"), shards, ranks, rank)(loaded, weight)
        assert torch.equal(loaded, torch.cat([x.chunk(ranks)[rank], b, c]))


def test_what_is_cut_alone_is_left_to_sglang() -> None:
    theirs = object()
    assert load_copies(lambda *_: theirs, [(16, 0, False), (8, 0, False)], 2, 0) is theirs
