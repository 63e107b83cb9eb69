"""A stand-in for `cuda.bindings.driver` that enforces the documented rules, and a driver that fails on order."""

import enum
import itertools
from types import SimpleNamespace

import pytest

from sglang_hybrid.core.errors import PoolExhausted

GRANULE = 2 << 20


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_SUPPORTED = 801


class FakeCuda:
    """Every call is recorded in `calls`; `fail[name]` is a list of statuses to answer next instead of working."""

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, memory=1 << 40, vmm=1):
        self.calls = []
        self.fail = {}
        self.memory = memory
        self.vmm = vmm
        self.reserved = {}  # address -> size
        self.mapped = {}  # address -> (size, handle, accessible)
        self.handles = {}  # handle -> size
        self._ids = itertools.count(1000)
        self._addresses = itertools.count(1 << 45, 1 << 40)

    @staticmethod
    def CUmemAllocationProp():
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    @staticmethod
    def CUmemAccessDesc():
        return SimpleNamespace(location=SimpleNamespace(type=None, id=None), flags=None)

    def _answer(self, name, *args):
        self.calls.append((name, *args))
        if self.fail.get(name):
            return self.fail[name].pop(0)
        return CUresult.CUDA_SUCCESS

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        body = object.__getattribute__(self, "_" + name)

        def call(*args):
            status = self._answer(name, *args)
            if status != CUresult.CUDA_SUCCESS:
                return (status, None) if name in ("cuMemCreate", "cuMemAddressReserve") else (status,)
            return body(*args)

        return call

    def _cuInit(self, flags):
        return (CUresult.CUDA_SUCCESS if flags == 0 else CUresult.CUDA_ERROR_INVALID_VALUE,)

    def _cuDeviceGet(self, ordinal):
        return CUresult.CUDA_SUCCESS, ordinal

    def _cuDeviceGetAttribute(self, attribute, device):
        return CUresult.CUDA_SUCCESS, self.vmm

    def _cuMemGetAllocationGranularity(self, properties, option):
        return CUresult.CUDA_SUCCESS, GRANULE

    def _cuMemGetInfo(self):
        return CUresult.CUDA_SUCCESS, self.memory - sum(self.handles.values()), self.memory

    def _cuMemAddressReserve(self, size, alignment, hint, flags):
        if size % GRANULE or flags or alignment & (alignment - 1):
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        address = next(self._addresses)
        self.reserved[address] = size
        return CUresult.CUDA_SUCCESS, address

    def _cuMemAddressFree(self, address, size):
        busy = any(address <= at < address + size for at in self.mapped)
        if self.reserved.get(address) != size or busy:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        del self.reserved[address]
        return (CUresult.CUDA_SUCCESS,)

    def _cuMemCreate(self, size, properties, flags):
        if size % GRANULE or properties.type != 1 or properties.location.type != 1:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        if sum(self.handles.values()) + size > self.memory:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        handle = next(self._ids)
        self.handles[handle] = size
        return CUresult.CUDA_SUCCESS, handle

    def _cuMemRelease(self, handle):
        if handle not in self.handles or any(entry[1] == handle for entry in self.mapped.values()):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        del self.handles[handle]
        return (CUresult.CUDA_SUCCESS,)

    def _cuMemMap(self, address, size, offset, handle, flags):
        inside = any(base <= address and address + size <= base + length for base, length in self.reserved.items())
        taken = any(at < address + size and address < at + entry[0] for at, entry in self.mapped.items())
        twice = any(entry[1] == handle for entry in self.mapped.values())
        if not inside or taken or twice or offset or flags or self.handles.get(handle) != size:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.mapped[address] = [size, handle, False]
        return (CUresult.CUDA_SUCCESS,)

    def _cuMemSetAccess(self, address, size, descriptions, count):
        if count != len(descriptions) or descriptions[0].flags != 3:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        at = address
        while at < address + size:
            if at not in self.mapped:
                return (CUresult.CUDA_ERROR_INVALID_VALUE,)
            self.mapped[at][2] = True
            at += self.mapped[at][0]
        return (CUresult.CUDA_SUCCESS,)

    def _cuMemUnmap(self, address, size):
        if address not in self.mapped or self.mapped[address][0] != size:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        del self.mapped[address]
        return (CUresult.CUDA_SUCCESS,)

    def _cuCtxSynchronize(self):
        return (CUresult.CUDA_SUCCESS,)


class Failing:
    """A driver in front of another that fails the n-th call of a method, once."""

    def __init__(self, inner):
        self.inner = inner
        self.plan = {}

    def fail(self, method, after, error=None):
        self.plan[method] = (after, error or PoolExhausted(f"injected into {method}: 0"))

    def __getattr__(self, name):
        target = getattr(self.inner, name)
        if name not in self.plan:
            return target

        def call(*args):
            if name in self.plan:
                after, error = self.plan[name]
                if after == 0:
                    del self.plan[name]
                    raise error
                self.plan[name] = (after - 1, error)
            return target(*args)

        return call


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def make_cuda():
    return FakeCuda


@pytest.fixture
def failing():
    return Failing
