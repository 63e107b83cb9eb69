"""A stand-in for `cuda.bindings.driver` that enforces the documented rules."""

import ctypes
import enum
import itertools
import mmap
import threading
from types import SimpleNamespace

GRANULE = 2 << 20
CONTEXT = 7000  # of GPU 0; that of GPU n is n more


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_SUPPORTED = 801


class FakeCuda:
    """Every call is recorded in `calls`; `fail[name]` is a list of statuses to answer next instead of working.

    The thread that makes it has the context of GPU 0, as torch leaves it; other threads have none. `worked_on` are the
    GPUs of the calls that work on the current context.
    """

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(
        CU_MEM_ALLOC_GRANULARITY_MINIMUM=0, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1
    )

    def __init__(self, memory=1 << 40, vmm=1):
        self.calls = []
        self.fail = {}
        self.memory = memory
        self.vmm = vmm
        self.reserved = {}  # address -> size
        self.mapped = {}  # address -> (size, handle, accessible)
        self.handles = {}  # handle -> size
        self.contents = {}  # handle -> the value of all its bytes
        self.zeroed_on = []  # streams of the memsets
        self.worked_on = []  # (call, GPU)
        self._contexts = threading.local()
        self._contexts.stack = [CONTEXT]
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

    def _cuDriverGetVersion(self):
        return CUresult.CUDA_SUCCESS, 13000

    def _cuDeviceGet(self, ordinal):
        return CUresult.CUDA_SUCCESS, ordinal

    def _cuDeviceGetAttribute(self, attribute, device):
        return CUresult.CUDA_SUCCESS, self.vmm

    def _cuMemGetAllocationGranularity(self, properties, option):
        return CUresult.CUDA_SUCCESS, GRANULE

    def current(self):
        """The GPU whose context is current on this thread, None if none is."""
        stack = getattr(self._contexts, "stack", [])
        return stack[-1] - CONTEXT if stack else None

    def _works(self, name):
        """Note that `name` worked on the current context; its status."""
        if self.current() is None:
            return CUresult.CUDA_ERROR_INVALID_CONTEXT
        self.worked_on.append((name, self.current()))
        return CUresult.CUDA_SUCCESS

    def _cuDevicePrimaryCtxRetain(self, device):
        return CUresult.CUDA_SUCCESS, CONTEXT + device

    def _cuCtxSetCurrent(self, context):
        self._contexts.stack = [*getattr(self._contexts, "stack", [])[:-1], context]
        return (CUresult.CUDA_SUCCESS,)

    def _cuCtxPushCurrent(self, context):
        self._contexts.stack = [*getattr(self._contexts, "stack", []), context]
        return (CUresult.CUDA_SUCCESS,)

    def _cuCtxPopCurrent(self):
        return CUresult.CUDA_SUCCESS, self._contexts.stack.pop()

    def _cuMemGetInfo(self):
        if self._works("cuMemGetInfo"):
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, None, None
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
        self.contents[handle] = 0xAB
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

    def byte_at(self, address):
        """What a read of the granule at `address` gives; a read of anything else is a fault."""
        return self.contents[self.mapped[address][1]]

    def write(self, address, value):
        """Fill the granule at `address`."""
        self.contents[self.mapped[address][1]] = value

    def _cuMemsetD8Async(self, address, value, size, stream):
        status = self._works("cuMemsetD8Async")
        if status or address not in self.mapped or self.mapped[address][0] != size or not self.mapped[address][2]:
            return (status or CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.zeroed_on.append(stream)
        self.write(address, value)
        return (CUresult.CUDA_SUCCESS,)

    def _cuMemUnmap(self, address, size):
        if address not in self.mapped or self.mapped[address][0] != size:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        del self.mapped[address]
        return (CUresult.CUDA_SUCCESS,)

    def _cuCtxSynchronize(self):
        return (self._works("cuCtxSynchronize"),)


class BackedCuda(FakeCuda):
    """The same over host memory, so that tensors over its addresses hold what was written to the granules there."""

    def __init__(self, memory=1 << 30):
        super().__init__(memory)
        self._ranges = {}  # address -> the mapping, which ends with the reservation

    def _cuMemAddressReserve(self, size, alignment, hint, flags):
        status, address = super()._cuMemAddressReserve(size, alignment, hint, flags)
        if status != CUresult.CUDA_SUCCESS:
            return status, None
        del self.reserved[address]
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        self.reserved[address], self._ranges[address] = size, area
        return status, address

    def _cuMemAddressFree(self, address, size):
        answer = super()._cuMemAddressFree(address, size)
        if answer == (CUresult.CUDA_SUCCESS,):
            del self._ranges[address]
        return answer

    def _cuMemCreate(self, size, properties, flags):
        status, handle = super()._cuMemCreate(size, properties, flags)
        if status == CUresult.CUDA_SUCCESS:
            self.contents[handle] = bytes([0xAB]) * size
        return status, handle

    def _cuMemMap(self, address, size, offset, handle, flags):
        answer = super()._cuMemMap(address, size, offset, handle, flags)
        if answer == (CUresult.CUDA_SUCCESS,):
            ctypes.memmove(address, self.contents[handle], size)
        return answer

    def _cuMemUnmap(self, address, size):
        handle = self.mapped[address][1] if address in self.mapped else None
        answer = super()._cuMemUnmap(address, size)
        if answer == (CUresult.CUDA_SUCCESS,):
            self.contents[handle] = ctypes.string_at(address, size)
        return answer

    def _cuMemRelease(self, handle):
        answer = super()._cuMemRelease(handle)
        if answer == (CUresult.CUDA_SUCCESS,):
            del self.contents[handle]
        return answer

    def write(self, address, value):
        ctypes.memset(address, value, self.mapped[address][0])

    def byte_at(self, address):
        return ctypes.string_at(address, 1)[0]
