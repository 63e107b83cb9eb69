"""CUDA virtual memory as a device, through `cuda.bindings.driver` (or any object with the same functions).

Order of calls, per granule: cuMemCreate (pooled), cuMemMap, cuMemSetAccess over the whole run, cuMemsetD8Async; back:
synchronize, cuMemUnmap; the handle returns to the pool and is released only by `trim`. cuMemUnmap while a kernel may
touch the range is undefined, so a synchronization of the GPU's context precedes every batch of unmaps.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from sglang_hybrid.core.errors import ConfigError, InvariantError, PoolExhausted

_UNFIT = ("NOT_SUPPORTED", "NOT_PERMITTED", "NOT_INITIALIZED", "NO_DEVICE", "INVALID_DEVICE", "DEINITIALIZED")


class CudaDriver:
    """A Driver (see device.driver) for GPU `device`, an index among those that are visible.

    It works in that GPU's primary context, the one torch uses, whichever is current on the calling thread. `api`
    defaults to `cuda.bindings.driver`, imported here and nowhere else. `reclaim` is asked when memory runs out,
    `stream` for the stream of the calling thread, as an integer; 0 is the default one.
    """

    name = "the GPU"
    creates_zeros = False  # cuMemCreate promises nothing

    def __init__(
        self,
        device: int,
        api: Any = None,
        reclaim: Callable[[], bool] = lambda: False,
        stream: Callable[[], int] = lambda: 0,
    ) -> None:
        self._api = api if api is not None else _load()
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", device)
        feature = self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call("cuDeviceGetAttribute", feature, self._device):
            raise ConfigError(f"this GPU has no virtual memory management; use the static pools: device {device}")
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
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
        self._reclaim = reclaim
        self._stream = stream
        self._handles: dict[int, Any] = {}
        self._next = 0

    @property
    def granularity_bytes(self) -> int:
        """See Driver."""
        return self._granularity

    def bind(self) -> None:
        """See Driver."""
        self._call("cuCtxSetCurrent", self._context)

    def available_bytes(self) -> int:
        """See Driver: free memory of the GPU, other processes' use deducted."""
        free, _ = self._inside("cuMemGetInfo")
        return int(free)

    def reserve(self, size_bytes: int) -> int:
        """See Driver. Alignment 0 is the driver's own, the granularity; a granule need not be a power of two."""
        try:
            return int(self._call("cuMemAddressReserve", size_bytes, 0, 0, 0))
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

    def reclaim(self) -> bool:
        """See Driver."""
        return self._reclaim()

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

    def zero(self, addresses: Sequence[int], size_bytes: int) -> None:
        """See Driver. Returns before it is done. What makes that safe:

        - Nothing older writes there: the memory was unmapped after `synchronize`, and its new addresses had none.
        - SGLang maps on the scheduler's thread, whose current stream this takes (`stream`). It has the forward stream
          wait for that one before every batch, and records the event that loads from a host tier wait for on it. So
          whatever reads or writes a page handed out later runs after its zeros.
        """
        stream = self._stream()
        for address in addresses:  # one by one: a call inside one handle is all that is sure to be allowed
            self._inside("cuMemsetD8Async", address, 0, size_bytes, stream)

    def unmap(self, address: int, size_bytes: int, handle: int) -> None:
        """See Driver. The range is exactly one mapped handle, as cuMemUnmap demands."""
        self._call("cuMemUnmap", address, size_bytes)

    def synchronize(self) -> None:
        """See Driver."""
        self._inside("cuCtxSynchronize")

    def _inside(self, name: str, *args: Any) -> Any:
        """`_call` of a function that works on the current context, which may be that of another GPU."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            return self._call(name, *args)
        finally:
            self._call("cuCtxPopCurrent")

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
