"""CUDA virtual memory as a device, through `cuda.bindings.driver` (or any object with the same functions).

Order of calls, per granule: cuMemCreate (pooled), cuMemMap, cuMemSetAccess over the whole run; back: synchronize,
cuMemUnmap; the handle returns to the pool and is released only by `trim`. cuMemUnmap while a kernel may touch the
range is undefined, so a synchronization of the current context precedes every batch of unmaps.
"""

import importlib
from typing import Any

from sglang_hybrid.core.errors import ConfigError, InvariantError, PoolExhausted

_UNFIT = ("NOT_SUPPORTED", "NOT_PERMITTED", "NOT_INITIALIZED", "NO_DEVICE", "INVALID_DEVICE", "DEINITIALIZED")


class CudaDriver:
    """A Driver (see device.driver) for one GPU. Needs a current context on every thread that maps (torch makes one).

    `api` defaults to `cuda.bindings.driver`, imported here and nowhere else.
    """

    name = "the GPU"

    def __init__(self, device: int = 0, api: Any = None) -> None:
        self._api = api if api is not None else _load()
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", device)
        feature = self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call("cuDeviceGetAttribute", feature, self._device):
            raise ConfigError(f"this GPU has no virtual memory management; use the static pools: device {device}")
        location_type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties = self._api.CUmemAllocationProp()
        self._properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = location_type
        self._properties.location.id = device
        self._access = self._api.CUmemAccessDesc()
        self._access.location.type = location_type
        self._access.location.id = device
        self._access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))
        self._handles: dict[int, Any] = {}
        self._next = 0

    @property
    def granularity_bytes(self) -> int:
        """See Driver."""
        return self._granularity

    def available_bytes(self) -> int:
        """See Driver: free memory of the GPU, other processes' use deducted."""
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    def reserve(self, size_bytes: int, alignment_bytes: int) -> int:
        """See Driver."""
        try:
            return int(self._call("cuMemAddressReserve", size_bytes, alignment_bytes, 0, 0))
        except PoolExhausted as error:
            raise ConfigError(f"lower the reach of the pools; no addresses left: {size_bytes} bytes") from error

    def free_reservation(self, address: int, size_bytes: int) -> None:
        """See Driver."""
        self._call("cuMemAddressFree", address, size_bytes)

    def create(self, size_bytes: int) -> int:
        """See Driver."""
        handle = self._call("cuMemCreate", size_bytes, self._properties, 0)
        self._next += 1
        self._handles[self._next] = handle
        return self._next

    def release(self, handle: int, size_bytes: int) -> None:
        """See Driver."""
        self._call("cuMemRelease", self._handles[handle])
        del self._handles[handle]

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """See Driver."""
        self._call("cuMemMap", address, size_bytes, 0, self._handles[handle], 0)

    def allow(self, address: int, size_bytes: int) -> None:
        """See Driver."""
        self._call("cuMemSetAccess", address, size_bytes, [self._access], 1)

    def unmap(self, address: int, size_bytes: int, handle: int) -> None:
        """See Driver. The range is exactly one mapped handle, as cuMemUnmap demands."""
        self._call("cuMemUnmap", address, size_bytes)

    def synchronize(self) -> None:
        """See Driver."""
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *args: Any) -> Any:
        """Call the driver; its result without the status. A status other than success becomes a typed error."""
        status, *results = getattr(self._api, name)(*args)
        if status == self._api.CUresult.CUDA_SUCCESS:
            return results[0] if len(results) == 1 else tuple(results)
        reason = getattr(status, "name", str(status))
        if status == self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise PoolExhausted(f"lower the budget or free GPU memory; {name}: {reason}")
        if any(word in reason for word in _UNFIT):
            raise ConfigError(f"check the GPU, its driver and that a context is current; {name}: {reason}")
        raise InvariantError(f"{name} was called against its contract or after a fault: {reason}")


def _load() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(f"install cuda-bindings to use GPU memory, or use the host backing: {error}") from error
