import ctypes
import mmap
import os
import threading
import warnings

import numpy as np
import pytest
import torch

from sglang_hybrid.core.errors import ConfigError, InvariantError, PoolExhausted
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.device.tensors import Rows, bytes_at, page_major_tensors, plane_tensors
from sglang_hybrid.memory.backing import Run
from sglang_hybrid.memory.budget import Budget, ReturnConfig
from sglang_hybrid.memory.layout import Layout, Planes
from tests.engine.smaps import unforked_bytes

G = 2 << 20
CPU = torch.device("cpu")


@pytest.fixture
def driver():
    driver = HostDriver(32 * G, G)
    yield driver
    driver.close()


@pytest.fixture
def backing(driver):
    with PooledBacking(driver, [16, 16], G, limit=24) as backing:
        yield backing


def test_resident_memory_follows_the_account(backing):
    base = unforked_bytes() - backing.committed_bytes
    backing.map([Run(0, 0, 1)])
    for action in (
        lambda: backing.map([Run(0, 2, 8), Run(1, 3, 4)]),
        lambda: backing.unmap([Run(0, 4, 6)]),
        lambda: backing.trim(keep=2),
        lambda: backing.map([Run(1, 8, 7)]),
        lambda: (backing.unmap([Run(1, 8, 7)]), backing.trim(keep=0)),
    ):
        action()
        assert unforked_bytes() - base == backing.committed_bytes
    backing.check()


def test_small_granules_bring_no_neighbours_into_memory():
    """A huge page under the first of them would hold the memory of sixty-four."""
    small, base = 32 << 10, unforked_bytes()
    driver = HostDriver(256 * small, small)
    with PooledBacking(driver, [256], small, limit=256) as backing:
        for action in (
            lambda: backing.map([Run(0, 0, 3)]),
            lambda: backing.prefault(70),
            lambda: backing.map([Run(0, 3, 100)]),
            lambda: (backing.unmap([Run(0, 0, 100)]), backing.trim(keep=0)),
        ):
            action()
            assert unforked_bytes() - base == backing.committed_bytes > 0
    driver.close()


def test_contents_stay_with_their_granule_and_addresses_never_move(backing):
    address = backing.address(0, 3)
    backing.map([Run(0, 3, 2)])
    ctypes.memset(address, 7, G)
    ctypes.memset(address + G, 9, G)
    backing.unmap([Run(0, 4, 1)])
    backing.map([Run(1, 0, 1)])
    assert ctypes.string_at(address, 4) == b"\7\7\7\7"
    assert ctypes.string_at(address + G - 1, 1) == b"\7"
    assert backing.address(0, 3) == address


def readable(address):
    """Whether the system would let this process read a byte at `address`; asks instead of touching."""
    libc = ctypes.CDLL(None, use_errno=True)
    read, write = os.pipe()
    count = libc.write(write, ctypes.c_void_p(address), ctypes.c_size_t(1))
    os.close(read)
    os.close(write)
    return count == 1


def test_only_mapped_addresses_can_be_touched(backing):
    address = backing.address(0, 5)
    assert not readable(address)
    backing.map([Run(0, 5, 1)])
    assert readable(address)
    assert readable(address + G - 1)
    assert not readable(address + G)
    backing.unmap([Run(0, 5, 1)])
    assert not readable(address)


def test_fork_after_init_is_refused_in_the_child(backing):
    backing.map([Run(0, 0, 1)])
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            backing.map([Run(0, 1, 1)])
        except ConfigError as error:
            os.write(write, str(error).encode())
        os.write(write, b"" if readable(backing.address(0, 0)) else b" and the memory is not shared")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert "spawn, not fork" in said
    assert said.endswith("not shared")
    backing.check()


@pytest.mark.parametrize("method", ["create", "map", "allow"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_failed_grow_is_rolled_back_and_leaks_nothing(driver, failing, method, after):
    faulty = failing(driver)
    with PooledBacking(faulty, [4] * 6, G, limit=24) as backing:
        backing.map([Run(plane, 0, 1) for plane in range(6)])
        faulty.fail(method, after)
        with pytest.raises(PoolExhausted, match="injected"):
            backing.map([Run(plane, 1, 1) for plane in range(6)])
        assert backing.mapped_bytes == 6 * G
        backing.check()
        backing.map([Run(plane, 1, 1) for plane in range(6)])
        assert backing.committed_bytes == 12 * G
        backing.check()


def test_prefault_on_another_thread(backing):
    thread = threading.Thread(target=backing.prefault, args=(10,))
    thread.start()
    backing.map([Run(0, 0, 6)])
    thread.join()
    backing.check()
    assert backing.committed_bytes >= 10 * G
    backing.prefault(100)
    assert backing.committed_bytes == 24 * G
    assert backing.prefault(100) == 0


def test_host_limits_are_typed_errors(driver, monkeypatch):
    with pytest.raises(ConfigError, match=f"multiple of {mmap.PAGESIZE}"):
        HostDriver(G, 1000)
    with pytest.raises(ConfigError, match="lower the budget"):
        PooledBacking(driver, [4], G, limit=1 << 40)
    with pytest.raises(ConfigError, match="lower the reach"):
        driver.reserve(1 << 60)
    monkeypatch.setattr(HostDriver, "available_bytes", lambda self: 0)
    with pytest.raises(PoolExhausted, match="free host memory"):
        driver.create(G)


def test_moving_what_is_not_there_is_an_error_of_ours(driver):
    address = driver.reserve(G)
    with pytest.raises((PoolExhausted, ConfigError, InvariantError)):
        driver.map(address + 1, G, 0)
    driver.free_reservation(address, G)


def test_tensors_are_views_for_life(backing):
    layout = Layout("kv", (Planes("k", 1, 1024), Planes("v", 1, 1024)), slots=8 * 2048)
    budget = Budget(24 * G, G, backing, returns=ReturnConfig(idle=0))
    pool = budget.add_pool(layout)
    (values,) = plane_tensors(backing, layout, layout.planes[1], 0, (2, 256), torch.bfloat16, CPU)
    assert values.shape == (8 * 2048, 2, 256)
    assert values.data_ptr() == backing.address(1)
    pages = pool.alloc(3000)
    index = torch.from_numpy(pages)
    values[index] = torch.arange(3000, dtype=torch.bfloat16)[:, None, None]
    assert torch.equal(values[index][:, 1, 255], torch.arange(3000, dtype=torch.bfloat16))
    pool.free(pages)
    assert budget.settle(now=1.0) == 4
    again = pool.alloc(10)
    values[torch.from_numpy(again)] = 3.0
    assert float(values[int(again[-1])].float().mean()) == 3.0
    assert values.data_ptr() == backing.address(1)


def test_padded_slots_and_every_dtype(backing):
    layout = Layout("state", (Planes("conv", 2, 64 << 10),), slots=32)
    Budget(8 * G, G, backing).add_pool(layout).alloc(32)
    for dtype, shape in (
        (torch.float32, (96, 100)),
        (torch.float8_e4m3fn, (8192, 7)),
        (torch.int64, (3,)),
        (torch.uint8, ()),
    ):
        first, second = plane_tensors(backing, layout, layout.planes[0], 0, shape, dtype, CPU)
        assert first.shape == (32, *shape)
        assert first.stride(0) * dtype.itemsize == 64 << 10
        first[5], second[5] = 1, 0
        assert bool((first[5].float() == 1).all())
        assert not bool((second[5].float() == 1).any())
    with pytest.raises(ConfigError, match="must hold"):
        plane_tensors(backing, layout, layout.planes[0], 0, (64 << 10,), torch.float32, CPU)


def test_layers_of_a_state_are_tensors_over_planes_of_their_own(driver):
    layout = Layout("state", (Planes("temporal", 3, G), Planes("conv", 3, G // 8)), slots=8)
    with PooledBacking(driver, layout.plane_granules, G, limit=30) as backing:
        pool = Budget(30 * G, G, backing).add_pool(layout)
        temporal = plane_tensors(backing, layout, layout.planes[0], 0, (2, 512, 512), torch.float32, CPU)
        conv = plane_tensors(backing, layout, layout.planes[1], 0, (1024, 3), torch.bfloat16, CPU)
        assert [each.shape for each in (*temporal, *conv)] == [(8, 2, 512, 512)] * 3 + [(8, 1024, 3)] * 3
        assert temporal[0].is_contiguous()
        assert not conv[0].is_contiguous()  # padded slots
        first, second = pool.alloc(2).tolist()
        for layer in range(3):
            temporal[layer][first], conv[layer][first] = layer + 1, -layer - 1
        for each in (*temporal, *conv):
            each[[second]] = each[[first]]
        assert [each[second, 1, 511, 511].item() for each in temporal] == [1, 2, 3]
        assert [each[second, 1023, 2].item() for each in conv] == [-1, -2, -3]
        assert temporal[2].data_ptr() == backing.address(2)
        pool.free(np.array([first, second]))


def test_page_major_rows_are_strided_views_of_one_plane(driver):
    """K and V of all layers of a token side by side: a granule holds 128 tokens instead of 1,024 of one layer's K."""
    layout = Layout("kv", (Planes("kv", 1, 16 << 10),), slots=1024, page_slots=16)
    assert (layout.column_slots, layout.column_granules) == (128, 1)
    with PooledBacking(driver, layout.plane_granules, G, limit=4) as backing:
        pool = Budget(4 * G, G, backing).add_pool(layout)
        each = Rows(4, (8, 128), torch.bfloat16)
        keys, values = page_major_tensors(backing, layout, 0, [each, each], CPU)
        tokens = (pool.alloc(10)[:, None] * 16 + np.arange(16)).reshape(-1)
        at = torch.from_numpy(tokens)
        for layer in range(4):
            keys[layer][at] = float(layer + 1)
            values[layer][at] = float(-layer - 1)
        assert backing.mapped_bytes == 2 * G
        assert keys[:, at[-1], 7, 127].tolist() == [1, 2, 3, 4]
        assert values[:, at[0], 0, 0].tolist() == [-1, -2, -3, -4]
        paged = keys[1].view(-1, 16, 8, 128)  # what paged attention kernels ask for
        assert bool((paged[:10] == 2).all())
        assert paged.data_ptr() == backing.address(0) + each.row_bytes
        with pytest.raises(ConfigError, match="must hold 4 x"):
            page_major_tensors(backing, layout, 0, [each, each, each], CPU)


def test_a_backing_made_from_other_layouts_is_refused(driver):
    layout = Layout("kv", (Planes("k", 2, 1024),), slots=8 * 2048)
    for sizes in ([8, 9], [7, 7], [8]):
        with PooledBacking(driver, sizes, G, limit=4) as backing, pytest.raises(ConfigError, match="plane_granules"):
            plane_tensors(backing, layout, layout.planes[0], 0, (512,), torch.bfloat16, CPU)


def test_bytes_at_keeps_its_owner_alive_and_names_the_devices_it_knows():
    owner = np.arange(16, dtype=np.uint8)
    view = bytes_at(owner.ctypes.data, 16, CPU, owner)
    address = owner.ctypes.data
    del owner
    assert view.data_ptr() == address
    assert view.tolist() == list(range(16))
    with pytest.raises(ConfigError, match="cpu and cuda"):
        bytes_at(0, 1, torch.device("meta"))


def test_recycled_memory_reads_zero_and_fresh_memory_is_not_written(backing, monkeypatch):
    zeroed = []
    zero = HostDriver.zero
    monkeypatch.setattr(
        HostDriver, "zero", lambda self, addresses, size: zeroed.extend(addresses) or zero(self, addresses, size)
    )
    backing.map([Run(0, 0, 2)])
    assert zeroed == [], "the system hands out zeros"
    states = bytes_at(backing.address(0), 2 * G, CPU, backing)
    assert not states.any()
    states.fill_(0xFF)
    backing.unmap([Run(0, 0, 2)])
    backing.map([Run(1, 4, 3)])
    assert not bytes_at(backing.address(1, 4), 3 * G, CPU, backing).any()
    assert len(zeroed) == 2, "two of the three were used before"
    backing.unmap([Run(1, 4, 3)])
    backing.trim(0)
    backing.map([Run(0, 0, 3)])
    assert len(zeroed) == 2, "memory that went back to the system comes back as zeros"
    assert not bytes_at(backing.address(0), 3 * G, CPU, backing).any()
