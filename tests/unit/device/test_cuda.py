"""The CUDA backing against a stand-in that enforces the documented rules. Not run on a GPU."""

import sys

import pytest

from sglang_hybrid.core.errors import ConfigError, InvariantError, PoolExhausted
from sglang_hybrid.device.backing import PooledBacking
from sglang_hybrid.device.cuda import CudaDriver
from sglang_hybrid.memory.backing import Run

G = 2 << 20


def names(api, since=0):
    return [call[0] for call in api.calls[since:]]


def test_a_run_is_mapped_granule_by_granule_and_allowed_at_once(cuda):
    backing = PooledBacking(CudaDriver(0, api=cuda), [4, 4], G, limit=8)
    start = len(cuda.calls)
    backing.map([Run(0, 1, 2), Run(1, 0, 1)])
    made = names(cuda, start)
    assert made.count("cuMemCreate") == made.count("cuMemMap") == 3
    assert made.count("cuMemSetAccess") == 2
    assert all(accessible for _, _, accessible in cuda.mapped.values())
    assert set(cuda.mapped) == {backing.address(0, 1), backing.address(0, 2), backing.address(1, 0)}
    backing.check()


def test_handles_are_recycled_and_unmapping_waits_for_the_gpu(cuda):
    backing = PooledBacking(CudaDriver(0, api=cuda), [4], G, limit=8)
    backing.map([Run(0, 0, 3)])
    start = len(cuda.calls)
    backing.unmap([Run(0, 0, 3)])
    waiting = ["cuCtxPushCurrent", "cuCtxSynchronize", "cuCtxPopCurrent"]
    assert names(cuda, start) == [*waiting, "cuMemUnmap", "cuMemUnmap", "cuMemUnmap"]
    assert (backing.mapped_bytes, backing.committed_bytes) == (0, 3 * G)
    start = len(cuda.calls)
    backing.map([Run(0, 1, 3)])
    assert "cuMemCreate" not in names(cuda, start)
    backing.unmap([Run(0, 1, 3)])
    assert backing.trim(keep=1) == 2
    assert len(cuda.handles) == 1
    assert backing.committed_bytes == G
    backing.check()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"])
def test_failure_in_the_middle_of_a_multi_layer_grow_is_rolled_back(cuda, call):
    backing = PooledBacking(CudaDriver(0, api=cuda), [4] * 6, G, limit=24)
    backing.map([Run(plane, 0, 1) for plane in range(6)])
    before = dict(cuda.mapped)
    ok, oom = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    cuda.fail[call] = [ok, ok, ok, oom]
    with pytest.raises(PoolExhausted, match=f"lower the budget or free GPU memory; {call}"):
        backing.map([Run(plane, 1, 1) for plane in range(6)])
    assert {at: entry[1] for at, entry in cuda.mapped.items()} == {at: entry[1] for at, entry in before.items()}
    backing.check()
    cuda.fail.clear()
    backing.map([Run(plane, 1, 1) for plane in range(6)])
    assert len(cuda.handles) == 12
    backing.check()


def test_failure_in_the_middle_of_an_unmap_is_rolled_back(cuda):
    backing = PooledBacking(CudaDriver(0, api=cuda), [4], G, limit=4)
    backing.map([Run(0, 0, 4)])
    cuda.fail["cuMemUnmap"] = [cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS]
    with pytest.raises(InvariantError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        backing.unmap([Run(0, 0, 4)])
    assert len(cuda.mapped) == 4
    assert all(accessible for _, _, accessible in cuda.mapped.values())
    backing.check()


@pytest.mark.parametrize(("first", "undo"), [("cuMemSetAccess", "cuMemUnmap"), ("cuMemUnmap", "cuMemMap")])
def test_a_driver_that_cannot_even_undo_leaves_true_books(cuda, first, undo):
    backing = PooledBacking(CudaDriver(0, api=cuda), [4], G, limit=4)
    if first == "cuMemUnmap":
        backing.map([Run(0, 0, 3)])
    ok, bad = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    cuda.fail = {first: [ok, bad] if first == "cuMemUnmap" else [bad], undo: [bad]}
    with pytest.raises(InvariantError, match="could not be undone"):
        (backing.unmap if first == "cuMemUnmap" else backing.map)([Run(0, 0, 3)])
    assert backing.mapped_bytes == len(cuda.mapped) * G
    backing.check()


def test_out_of_memory_leaves_what_was_created_in_the_pool(make_cuda):
    api = make_cuda(memory=8 * G)
    backing = PooledBacking(CudaDriver(0, api=api), [16], G, limit=8)
    api.memory = 3 * G  # another process took the rest
    with pytest.raises(PoolExhausted):
        backing.map([Run(0, 0, 5)])
    assert (backing.mapped_bytes, backing.committed_bytes) == (0, 3 * G)
    backing.map([Run(0, 0, 3)])
    backing.check()


def test_misuse_reaches_no_driver(cuda):
    backing = PooledBacking(CudaDriver(0, api=cuda), [4], G, limit=2)
    backing.map([Run(0, 0, 1)])
    calls = len(cuda.calls)
    for wrong in ([Run(0, 0, 1)], [Run(0, 3, 2)], [Run(1, 0, 1)]):
        with pytest.raises(InvariantError):
            backing.map(wrong)
    with pytest.raises(InvariantError):
        backing.unmap([Run(0, 1, 1)])
    with pytest.raises(PoolExhausted, match="the backing may hold 2"):
        backing.map([Run(0, 1, 2)])
    assert len(cuda.calls) == calls


def test_planes_lie_one_after_the_other_in_one_range(cuda):
    backing = PooledBacking(CudaDriver(0, api=cuda), [4, 2, 2], G, limit=4)
    assert list(cuda.reserved.values()) == [8 * G]
    base = backing.address(0)
    assert [backing.address(1), backing.address(2, 1)] == [base + 4 * G, base + 7 * G]


def test_pools_that_come_one_by_one_share_the_physical_memory(cuda):
    with PooledBacking(CudaDriver(0, api=cuda), [], G, limit=4) as backing:
        assert [backing.add_planes([4, 4]), backing.add_planes([2])] == [0, 2]
        assert sorted(cuda.reserved.values()) == [2 * G, 8 * G]
        backing.map([Run(0, 0, 3)])
        backing.unmap([Run(0, 0, 3)])
        backing.map([Run(2, 0, 2)])
        assert backing.committed_bytes == 3 * G
        with pytest.raises(ConfigError, match="at least one granule"):
            backing.add_planes([3, 0])
    assert (cuda.mapped, cuda.handles, cuda.reserved) == ({}, {}, {})
    with pytest.raises(InvariantError, match="closed"):
        backing.add_planes([1])


def test_reserve_failure_leaves_nothing(cuda):
    driver = CudaDriver(0, api=cuda)
    cuda.fail["cuMemAddressReserve"] = [cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY]
    with pytest.raises(ConfigError, match="lower the reach of the pools"):
        PooledBacking(driver, [4, 4, 4], G, limit=4)
    assert cuda.reserved == {}


def test_close_returns_everything(cuda):
    with PooledBacking(CudaDriver(0, api=cuda), [4, 2], G, limit=6) as backing:
        backing.map([Run(0, 0, 4)])
        backing.prefault(2)
    assert (cuda.mapped, cuda.handles, cuda.reserved) == ({}, {}, {})
    backing.close()
    with pytest.raises(InvariantError, match="closed"):
        backing.map([Run(0, 0, 1)])


def test_what_the_machine_cannot_do_is_a_config_error(make_cuda, monkeypatch):
    with pytest.raises(ConfigError, match="no virtual memory management"):
        CudaDriver(0, api=make_cuda(vmm=0))
    api = make_cuda()
    api.fail["cuInit"] = [api.CUresult.CUDA_ERROR_NOT_INITIALIZED]
    with pytest.raises(ConfigError, match="check the GPU"):
        CudaDriver(0, api=api)
    with pytest.raises(ConfigError, match="multiple of 2097152"):
        PooledBacking(CudaDriver(0, api=make_cuda()), [1], 4096, limit=1)
    with pytest.raises(ConfigError, match="lower the budget"):
        PooledBacking(CudaDriver(0, api=make_cuda(memory=G)), [8], G, limit=2)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match="install cuda-bindings"):
        CudaDriver(0)


def test_a_granule_reads_zero_whatever_it_held_before(cuda):
    """On the stream that is current when it is mapped; fresh memory promises nothing either."""
    streams = iter(range(50, 70))
    backing = PooledBacking(CudaDriver(0, api=cuda, stream=lambda: next(streams)), [4, 4], G, limit=4)
    backing.map([Run(0, 0, 3), Run(1, 3, 1)])
    states = [backing.address(0, index) for index in range(3)]
    assert [cuda.byte_at(at) for at in (*states, backing.address(1, 3))] == [0] * 4
    for at in states:
        cuda.write(at, 0x7F)
    start = len(cuda.calls)
    backing.unmap([Run(0, 0, 3)])
    backing.map([Run(1, 0, 2)])
    assert [cuda.byte_at(backing.address(1, index)) for index in (0, 1)] == [0, 0]
    order = [name for name in names(cuda, start) if name in ("cuCtxSynchronize", "cuMemUnmap", "cuMemsetD8Async")]
    assert order == ["cuCtxSynchronize", *["cuMemUnmap"] * 3, *["cuMemsetD8Async"] * 2]
    assert cuda.zeroed_on == [50] * 4 + [51] * 2


def test_a_failed_unmap_leaves_the_bytes_where_they_are(cuda):
    backing = PooledBacking(CudaDriver(0, api=cuda), [2], G, limit=2)
    backing.map([Run(0, 0, 2)])
    cuda.write(backing.address(0, 0), 0x7F)
    cuda.fail["cuMemUnmap"] = [cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS]
    with pytest.raises(InvariantError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        backing.unmap([Run(0, 0, 2)])
    assert cuda.byte_at(backing.address(0, 0)) == 0x7F
