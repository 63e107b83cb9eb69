import numpy as np
import pytest

from avmp.handles import HandleTable, tag_of
from sglang_hybrid.core.errors import ConfigError, InvariantError


def test_a_handle_is_32_bits_of_tag_and_page_and_survives_a_move():
    table = HandleTable(tag=3, page_bytes=65536)
    handles = table.mint(np.array([7, 9], dtype=np.int64))
    assert handles.dtype == np.uint32
    assert tag_of(handles).tolist() == [3, 3]
    assert handles.tolist() == [3 << 28, (3 << 28) + 1]
    table.move(handles, np.array([1, 2], dtype=np.int64))
    assert table.resolve(handles).tolist() == [1, 2]
    assert table.live_bytes == 2 * 65536
    table.check()


def test_a_dead_or_foreign_handle_is_an_error_and_never_another_page():
    table = HandleTable(tag=0, page_bytes=16)
    handles = table.mint(np.arange(2000, dtype=np.int64))
    assert table.remove(handles[:1000]).tolist() == list(range(1000))
    fresh = table.mint(np.arange(10, dtype=np.int64))
    assert not set(fresh.tolist()) & set(handles.tolist())
    assert len(table.live(handles)) == 1000
    for bad in (handles[:1], fresh + np.uint32(100), fresh | np.uint32(1 << 28)):
        with pytest.raises(InvariantError):
            table.resolve(bad)
    table.check()
    assert len(table.remove(np.empty(0, dtype=np.uint32))) == 0


def test_a_table_that_names_a_page_twice_fails_its_check():
    table = HandleTable(tag=0, page_bytes=16)
    table.mint(np.array([5, 5], dtype=np.int64))
    with pytest.raises(InvariantError):
        table.check()


def test_the_name_space_is_bounded():
    with pytest.raises(ConfigError):
        HandleTable(tag=16, page_bytes=16)
