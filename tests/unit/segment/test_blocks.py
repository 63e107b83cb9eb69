"""The memory of entries: blocks of states and slots of KV in one buffer."""

import random

import numpy as np
import pytest

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.segment.blocks import Blocks
from sglang_hybrid.segment.slabs import Cut, Numbering


def test_both_kinds_share_the_blocks() -> None:
    blocks = Blocks(3, Cut(10))
    state, slots = blocks.take_state(), blocks.kv.take(15)
    assert (blocks.free, blocks.kv.free) == (0, 5)
    assert {int(slot) // 10 for slot in slots} == {0, 1, 2} - {state}
    assert len(set(slots.tolist())) == 15
    assert slots.dtype == np.int64
    blocks.check()
    blocks.kv.give(slots)
    blocks.give_state(state)
    assert (blocks.free, blocks.kv.free) == (3, 0)


def test_what_is_missing_counts_whole_blocks_and_free_slots() -> None:
    blocks = Blocks(4, Cut(10))
    assert blocks.missing(4, 0) == blocks.missing(1, 30) == 0
    assert blocks.missing(1, 31) == blocks.missing(5, 0) == 1
    blocks.kv.take(3)  # seven slots are left of its block
    assert blocks.missing(3, 7) == 0
    assert blocks.missing(3, 8) == 1
    assert blocks.missing(0, 37) == 0
    assert blocks.missing(0, 58) == 3


def test_the_fullest_block_is_filled_first() -> None:
    blocks = Blocks(3, Cut(10))
    first, second = blocks.kv.take(10), blocks.kv.take(10)
    blocks.kv.give(first[:6])
    blocks.kv.give(second[:2])
    more = blocks.kv.take(3)
    assert [int(slot) // 10 for slot in more] == [second[0] // 10] * 2 + [first[0] // 10]
    assert blocks.free == 1


def test_transitions_have_blocks_of_their_own() -> None:
    blocks = Blocks(4, Cut(10), transitions=Cut(3, Numbering(7, 2)))
    state, tokens, matrices = blocks.take_state(), blocks.kv.take(5), blocks.transitions.take(4)
    assert {int(each) % 7 for each in matrices} <= {0, 2, 4}
    taken = [{state}, {int(tokens[0]) // 10}, {int(each) // 7 for each in matrices}]
    assert set.union(*taken) == blocks.taken == {0, 1, 2, 3}
    assert (blocks.free, blocks.missing(0, 5, 2), blocks.missing(0, 6), blocks.missing(0, 0, 3)) == (0, 0, 1, 1)
    assert blocks.ever_fit(10, 6)
    assert not blocks.ever_fit(10, 7)
    blocks.check()
    blocks.transitions.give(matrices[1:])
    assert (blocks.free, blocks.transitions.free) == (1, 2)
    with pytest.raises(InvariantError, match="holds no transitions"):
        blocks.transitions.give(matrices[-1:])
    blocks.check()


def test_no_tokens_take_no_block() -> None:
    blocks = Blocks(1, Cut(10))
    assert blocks.kv.take(0).tolist() == []
    assert blocks.free == 1


def test_what_was_not_asked_for_is_refused() -> None:
    blocks = Blocks(2, Cut(10))
    state = blocks.take_state()
    with pytest.raises(InvariantError, match="11 of KV do not fit"):
        blocks.kv.take(11)
    slots = blocks.kv.take(10)
    with pytest.raises(InvariantError, match="no block is free, of 2"):
        blocks.take_state()
    with pytest.raises(InvariantError, match="holds no states"):
        blocks.give_state(int(slots[0]) // 10)
    with pytest.raises(InvariantError, match="holds no KV"):
        blocks.kv.give(np.array([state * 10]))
    with pytest.raises(InvariantError, match="given back twice"):
        blocks.kv.give(np.append(slots[:9], slots[0]))
    with pytest.raises(InvariantError, match="one slot or more, for KV: 0"):
        Blocks(1, Cut(0))
    blocks.give_state(state)
    with pytest.raises(InvariantError, match="holds no states"):
        blocks.give_state(state)


def test_check_finds_what_is_lost_doubled_or_out_of_place() -> None:
    def broken(how: str) -> Blocks:
        blocks = Blocks(3, Cut(4))
        blocks.take_state()
        slots = blocks.kv.take(2)
        blocks.check()
        block = int(slots[0]) // 4
        if how == "lost":
            blocks._source._free.pop()
        elif how == "doubled":
            blocks._source._free.append(block)
        elif how == "slot":
            blocks.kv._open[block][0] = blocks.kv._open[block][1]
        elif how == "place":
            blocks.kv._open[block][0] += 4
        elif how == "count":
            blocks.kv._free += 1
        else:
            blocks.kv._open[block] = np.append(blocks.kv._open[block], slots)
        return blocks

    for how, message in [
        ("lost", "2 of 3"), ("doubled", "4 of 3"), ("slot", "slots of block"), ("place", "slots of block"),
        ("empty", "holds nothing"), ("count", "counted wrongly: 3"),
    ]:  # fmt: skip
        with pytest.raises(InvariantError, match=message):
            broken(how).check()


def test_random_uses_against_sets() -> None:
    rng, blocks = random.Random(5), Blocks(12, Cut(7))
    states, tokens = list[int](), list[list[int]]()
    for _ in range(2000):
        if rng.random() < 0.5:
            count = rng.randrange(25)
            fits = blocks.missing(1, count) == 0
            assert blocks.kv.wanted(count) == blocks.kv._places(count)[1]
            assert fits == (blocks.free > 0 and count <= blocks.kv.free + 7 * (blocks.free - 1))
            if fits:
                states.append(blocks.take_state())
                tokens.append(blocks.kv.take(count).tolist())
                assert len(tokens[-1]) == count
        elif tokens:
            blocks.give_state(states.pop(rng.randrange(len(states))))
            some = tokens.pop(rng.randrange(len(tokens)))
            rng.shuffle(some)
            blocks.kv.give(np.array(some, np.int64))
        blocks.check()
        out = [slot for each in tokens for slot in each]
        assert len(set(out)) == len(out)
        with_kv = {slot // 7 for slot in out}
        assert not with_kv & set(states)
        assert blocks.free == 12 - len(with_kv) - len(states)
        assert blocks.kv.free == 7 * len(with_kv) - len(out)
