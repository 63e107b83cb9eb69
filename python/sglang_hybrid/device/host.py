"""Host memory as a device: reserved addresses, physical granules that move between them, memory really returned.

A physical granule is created in a *parking* range (MADV_POPULATE_WRITE on anonymous memory, huge pages where whole
ones fit), moved under its addresses with mremap, which moves page tables and not bytes, and moved back on
unmap; release is MADV_DONTNEED. Unmapped addresses are PROT_NONE: touching one is a fault, as it is on a GPU. The
resident set of the process is exactly the granules created.
"""

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Sequence

from sglang_hybrid.core.errors import ConfigError, InvariantError, PoolExhausted

_PROT_NONE, _PROT_RW = 0, mmap.PROT_READ | mmap.PROT_WRITE
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP (Linux 5.7)
_DONTNEED, _DONTFORK, _HUGEPAGE, _NOHUGEPAGE, _POPULATE_WRITE = 4, 10, 14, 15, 23  # the last: Linux 5.14
_HUGE_SIZE = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"
_ALIGNMENT = 2 << 20  # of every range: a huge page of x86 and of ARM with 4 KiB pages
_FAILED = ctypes.c_void_p(-1).value


class HostDriver:
    """A Driver (see device.driver) over Linux calls. `parking_bytes` bounds the physical memory it can create."""

    name = "host memory"
    creates_zeros = True

    def __init__(self, parking_bytes: int, granule_bytes: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._libc.mmap.restype = self._libc.mremap.restype = address
        self._libc.mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
        self._libc.mremap.argtypes = (address, size, size, number, address)
        self._libc.munmap.argtypes = (address, size)
        self._libc.madvise.argtypes = self._libc.mprotect.argtypes = (address, size, number)
        if parking_bytes < granule_bytes or granule_bytes % self.granularity_bytes:
            raise ConfigError(
                f"park at least one granule, a multiple of {self.granularity_bytes} bytes: {granule_bytes}"
            )
        self._granule_bytes = granule_bytes
        self._slots = parking_bytes // granule_bytes
        self._parking = self.reserve(self._slots * granule_bytes)
        self._call("mprotect", self._parking, self._slots * granule_bytes, _PROT_RW)
        # Best effort: with huge pages a granule moves in one step, without them in 512. A granule that is not a whole
        # number of them would bring its neighbours into memory.
        huge = _huge_page_bytes()
        whole = huge > 0 and granule_bytes % huge == 0
        self._libc.madvise(self._parking, self._slots * granule_bytes, _HUGEPAGE if whole else _NOHUGEPAGE)
        self._vacant = list(range(self._slots - 1, -1, -1))

    @property
    def granularity_bytes(self) -> int:
        """See Driver: the page size of the system."""
        return mmap.PAGESIZE

    def bind(self) -> None:
        """See Driver; host memory belongs to all threads."""

    def available_bytes(self) -> int:
        """See Driver: MemAvailable of the system. Asked before every creation, so the file stays open: 4 us, not 40."""
        text = os.pread(_meminfo(), 4096, 0)
        start = text.index(b"MemAvailable:") + len(b"MemAvailable:")
        return int(text[start : text.index(b"kB", start)]) * 1024

    def reserve(self, size_bytes: int) -> int:
        """See Driver; a granule of whole huge pages begins with one."""
        padded = size_bytes + _ALIGNMENT
        start = self._libc.mmap(None, padded, _PROT_NONE, _RESERVED, -1, 0)
        if start in (_FAILED, None):
            code = errno.errorcode.get(ctypes.get_errno(), "?")
            raise ConfigError(
                f"lower the reach of the pools or raise 'ulimit -v'; {code}: {size_bytes} bytes of addresses"
            )
        address = -(-start // _ALIGNMENT) * _ALIGNMENT
        head, tail = address - start, start + padded - address - size_bytes
        if head:
            self._call("munmap", start, head)
        if tail:
            self._call("munmap", address + size_bytes, tail)
        self._call("madvise", address, size_bytes, _DONTFORK)
        return int(address)

    def free_reservation(self, address: int, size_bytes: int) -> None:
        """See Driver."""
        self._call("munmap", address, size_bytes)

    def create(self, size_bytes: int) -> int:
        """See Driver; a handle is a slot of the parking range."""
        if not self._vacant or size_bytes > self.available_bytes():
            raise PoolExhausted(f"free host memory or lower the budget: {size_bytes} bytes more")
        slot = self._vacant.pop()
        try:
            self._call("madvise", self._park(slot), size_bytes, _POPULATE_WRITE)
        except PoolExhausted:
            self._vacant.append(slot)
            raise
        return slot

    def reclaim(self) -> bool:
        """See Driver; nobody keeps any."""
        return False

    def release(self, handle: int, size_bytes: int) -> None:
        """See Driver."""
        self._call("madvise", self._park(handle), size_bytes, _DONTNEED)
        self._vacant.append(handle)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """See Driver; accessible at once."""
        self._move(self._park(handle), address, size_bytes)

    def allow(self, address: int, size_bytes: int) -> None:
        """See Driver; nothing to do."""

    def zero(self, addresses: Sequence[int], size_bytes: int) -> None:
        """See Driver."""
        for address in addresses:
            ctypes.memset(address, 0, size_bytes)

    def unmap(self, address: int, size_bytes: int, handle: int) -> None:
        """See Driver."""
        self._move(address, self._park(handle), size_bytes)
        self._call("mprotect", address, size_bytes, _PROT_NONE)

    def synchronize(self) -> None:
        """See Driver; host work is synchronous."""

    def close(self) -> None:
        """Give the parking range back."""
        if self._slots:
            self._call("munmap", self._parking, self._slots * self._granule_bytes)
            self._slots = 0

    def _park(self, slot: int) -> int:
        return self._parking + slot * self._granule_bytes

    def _move(self, source: int, target: int, size_bytes: int) -> None:
        if self._libc.mremap(source, size_bytes, size_bytes, _MOVE, target) in (_FAILED, None):
            self._fail("mremap", ctypes.get_errno(), size_bytes)

    def _call(self, name: str, address: int, size_bytes: int, *rest: int) -> None:
        if getattr(self._libc, name)(address, size_bytes, *rest):
            self._fail(name, ctypes.get_errno(), size_bytes)

    def _fail(self, name: str, code: int, size_bytes: int) -> None:
        if code in (errno.ENOMEM, errno.EFAULT, errno.EAGAIN):
            raise PoolExhausted(f"free memory, or raise vm.max_map_count ({_map_count()}); {name}: {size_bytes} bytes")
        if code == errno.EINVAL and name in ("mremap", "madvise"):
            raise ConfigError(f"the host backing needs Linux 5.14 or newer; {name} failed on: {os.uname().release}")
        raise InvariantError(f"{name} on {size_bytes} bytes failed: {errno.errorcode.get(code, code)}")


@functools.cache
def _meminfo() -> int:
    return os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC)


def _huge_page_bytes() -> int:
    """The size of a transparent huge page, 0 where there are none."""
    try:
        with open(_HUGE_SIZE) as text:
            return int(text.read())
    except OSError:
        return 0


def _map_count() -> str:
    with open("/proc/sys/vm/max_map_count") as text:
        return text.read().strip()
