"""Chains of marks, and a history that the garbage collector does not walk over."""

import gc
import random
import sys

import numpy as np
import pytest

import sglang_hybrid.prefix
from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.reuse.chain import Chain
from sglang_hybrid.prefix.reuse.classes import PRIORS
from sglang_hybrid.prefix.reuse.history import History
from sglang_hybrid.prefix.reuse.table import ReuseTable
from sglang_hybrid.prefix.tree.mark import Kind, Mark


def test_a_chain_keeps_the_order_of_a_list() -> None:
    chain, model, rng = Chain(), list[Mark](), random.Random(1)
    for step in range(500):
        if model and rng.random() < 0.45:
            mark = model.pop(rng.randrange(len(model)))
            chain.remove(mark)
        else:
            model.append(Mark(Kind.FRESH, float(step)))
            chain.append(model[-1])
        chain.check()
        assert list(chain) == model
        assert chain.first is (model[0] if model else None)
    chain.clear()
    assert (chain.size, chain.first, chain.last) == (0, None, None)
    assert all(mark.older is None and mark.newer is None for mark in model)


def test_check_finds_a_broken_link() -> None:
    chain = Chain()
    for _ in range(3):
        chain.append(Mark(Kind.FRESH, 0.0))
    assert chain.first is not None
    chain.first.older = chain.last
    with pytest.raises(InvariantError, match="links"):
        chain.check()


def grown(requests: int) -> History:
    history, rng = History(ReuseTable(PRIORS), max_marks=400), np.random.default_rng(3)
    shared = rng.integers(0, 30_000, 60).astype(np.int32)
    for request in range(requests):
        tokens = np.concatenate((shared[: rng.integers(1, 60)], rng.integers(0, 30_000, 20).astype(np.int32)))
        history.observe(tokens, tokens.size, float(request))
    history.check()
    return history


def test_compiled_nodes_and_marks_are_not_garbage_collected() -> None:
    history = grown(50)
    mark = history.observe(np.arange(40, dtype=np.int32), 40, 60.0).tip
    assert mark.node is not None
    tracked = sglang_hybrid.prefix.FORM != "compiled"
    assert (gc.is_tracked(mark), gc.is_tracked(mark.node)) == (tracked, tracked)


def test_a_history_that_goes_leaves_nothing_behind() -> None:
    grown(2000)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(5):
        grown(2000)
    gc.collect()
    assert sys.getallocatedblocks() - before < 1000, "a history of this size takes about ten thousand blocks"
