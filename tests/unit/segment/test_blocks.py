"""The memory of entries: blocks of states and slots of KV in one buffer."""

import random

import numpy as np
import pytest

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.segment.blocks import Blocks


def test_both_kinds_share_the_blocks() -> None:
    blocks = Blocks(3, 10)
    state, slots = blocks.take_state(), blocks.take_tokens(15)
    assert (blocks.free_blocks, blocks.free_tokens) == (0, 5)
    assert {int(slot) // 10 for slot in slots} == {0, 1, 2} - {state}
    assert len(set(slots.tolist())) == 15
    assert slots.dtype == np.int64
    blocks.check()
    blocks.give_tokens(slots)
    blocks.give_state(state)
    assert (blocks.free_blocks, blocks.free_tokens) == (3, 0)


def test_what_is_missing_counts_whole_blocks_and_free_slots() -> None:
    blocks = Blocks(4, 10)
    assert blocks.missing(4, 0) == blocks.missing(1, 30) == 0
    assert blocks.missing(1, 31) == blocks.missing(5, 0) == 1
    blocks.take_tokens(3)  # seven slots are left of its block
    assert blocks.missing(3, 7) == 0
    assert blocks.missing(3, 8) == 1
    assert blocks.missing(0, 37) == 0
    assert blocks.missing(0, 58) == 3


def test_the_fullest_block_is_filled_first() -> None:
    blocks = Blocks(3, 10)
    first, second = blocks.take_tokens(10), blocks.take_tokens(10)
    blocks.give_tokens(first[:6])
    blocks.give_tokens(second[:2])
    more = blocks.take_tokens(3)
    assert [int(slot) // 10 for slot in more] == [second[0] // 10] * 2 + [first[0] // 10]
    assert blocks.free_blocks == 1


def test_no_tokens_take_no_block() -> None:
    blocks = Blocks(1, 10)
    assert blocks.take_tokens(0).tolist() == []
    assert blocks.free_blocks == 1


def test_what_was_not_asked_for_is_refused() -> None:
    blocks = Blocks(2, 10)
    state = blocks.take_state()
    with pytest.raises(InvariantError, match="11 tokens do not fit"):
        blocks.take_tokens(11)
    slots = blocks.take_tokens(10)
    with pytest.raises(InvariantError, match="no block is free, of 2"):
        blocks.take_state()
    with pytest.raises(InvariantError, match="holds no states"):
        blocks.give_state(int(slots[0]) // 10)
    with pytest.raises(InvariantError, match="holds no KV"):
        blocks.give_tokens(np.array([state * 10]))
    with pytest.raises(InvariantError, match="given back twice"):
        blocks.give_tokens(np.append(slots[:9], slots[0]))
    with pytest.raises(InvariantError, match="count >= 0 and slots"):
        Blocks(1, 0)
    blocks.give_state(state)
    with pytest.raises(InvariantError, match="holds no states"):
        blocks.give_state(state)


def test_check_finds_what_is_lost_doubled_or_out_of_place() -> None:
    def broken(how: str) -> Blocks:
        blocks = Blocks(3, 4)
        blocks.take_state()
        slots = blocks.take_tokens(2)
        blocks.check()
        block = int(slots[0]) // 4
        if how == "lost":
            blocks._source._free.pop()
        elif how == "doubled":
            blocks._source._free.append(block)
        elif how == "slot":
            blocks._open[block][0] = blocks._open[block][1]
        elif how == "place":
            blocks._open[block][0] += 4
        elif how == "count":
            blocks._open_tokens += 1
        else:
            blocks._open[block] = np.append(blocks._open[block], slots)
        return blocks

    for how, message in [
        ("lost", "2 of 3"), ("doubled", "4 of 3"), ("slot", "slots of block"), ("place", "slots of block"),
        ("empty", "holds nothing"), ("count", "counted wrongly: 3"),
    ]:  # fmt: skip
        with pytest.raises(InvariantError, match=message):
            broken(how).check()


def test_random_uses_against_sets() -> None:
    rng, blocks = random.Random(5), Blocks(12, 7)
    states, tokens = list[int](), list[list[int]]()
    for _ in range(2000):
        if rng.random() < 0.5:
            count = rng.randrange(25)
            fits = blocks.missing(1, count) == 0
            assert fits == (blocks.free_blocks > 0 and count <= blocks.free_tokens + 7 * (blocks.free_blocks - 1))
            if fits:
                states.append(blocks.take_state())
                tokens.append(blocks.take_tokens(count).tolist())
                assert len(tokens[-1]) == count
        elif tokens:
            blocks.give_state(states.pop(rng.randrange(len(states))))
            some = tokens.pop(rng.randrange(len(tokens)))
            rng.shuffle(some)
            blocks.give_tokens(np.array(some, np.int64))
        blocks.check()
        out = [slot for each in tokens for slot in each]
        assert len(set(out)) == len(out)
        with_kv = {slot // 7 for slot in out}
        assert not with_kv & set(states)
        assert blocks.free_blocks == 12 - len(with_kv) - len(states)
        assert blocks.free_tokens == 7 * len(with_kv) - len(out)
