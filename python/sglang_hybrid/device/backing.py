"""Physical granules behind the planes of all pools: pooled handles, atomic map and unmap, addresses for life.

Creating physical memory costs two orders of magnitude more than mapping it (CUDA: 193 us against 1.5 us per 2 MiB
page, as kvcached measured), so unmapped granules stay in a pool and are mapped again; `prefault` creates ahead of
need, from any thread; `trim` gives them back to the system.
"""

import itertools
import os
import threading
from collections.abc import Callable, Sequence

from sglang_hybrid.core.errors import ConfigError, HybridError, InvariantError, PoolExhausted
from sglang_hybrid.device.driver import Driver
from sglang_hybrid.memory.backing import Granule, Run, require_mapped, require_unmapped


class PooledBacking:
    """A Backing (see memory.backing) over a Driver. `plane_granules` gives the length of every plane.

    Planes given together lie one after the other in one reserved range, in order and without gaps.

    Owns the ranges and every physical handle. `limit` is the most granules it may ever create: the budget,
    hence the machine's memory is taken once and not twice. Use `close` or a with-statement; the ranges end with it.
    """

    def __init__(self, driver: Driver, plane_granules: Sequence[int], granule_bytes: int, limit: int) -> None:
        if granule_bytes % driver.granularity_bytes:
            raise ConfigError(f"use granules of a multiple of {driver.granularity_bytes} bytes: {granule_bytes}")
        if limit * granule_bytes > driver.available_bytes():
            raise ConfigError(
                f"lower the budget: {driver.name} has {driver.available_bytes()} bytes: {limit * granule_bytes} asked"
            )
        self.driver = driver
        self.granule_bytes = granule_bytes
        self.limit = limit
        self.plane_granules: tuple[int, ...] = ()
        self._owner_pid = os.getpid()
        self._mapped: dict[Granule, int] = {}
        self._pooled: list[int] = []
        self._clean: set[int] = set()  # handles that read zero, because they were never mapped
        self._created = 0
        self._lock = threading.Lock()  # guards _pooled and _created: prefault may run on another thread
        self._creating = threading.Lock()  # one creation at a time; taken before _lock
        self._bases: list[int] = []
        self._ranges: list[tuple[int, int]] = []  # (address, bytes)
        self._closed = False
        self.reclaimed = 0  # times that memory was there once other caches of the process had given theirs back
        self.on_taken: Callable[[], None] | None = None  # told that handles were taken: who creates ahead may have to
        if plane_granules:
            self.add_planes(plane_granules)

    def add_planes(self, plane_granules: Sequence[int]) -> int:
        """Reserve one more range for planes of these lengths; the number of the first. Pools may come one by one."""
        self._require_owner()
        if not plane_granules or min(plane_granules) < 1:
            raise ConfigError(f"every plane needs at least one granule: {tuple(plane_granules)}")
        size_bytes = sum(plane_granules) * self.granule_bytes
        base = self.driver.reserve(size_bytes)  # one range: equal planes can be one tensor
        self._ranges.append((base, size_bytes))
        starts = itertools.accumulate(plane_granules[:-1], initial=0)
        self._bases += [base + start * self.granule_bytes for start in starts]
        self.plane_granules += tuple(plane_granules)
        return len(self.plane_granules) - len(plane_granules)

    def __enter__(self) -> "PooledBacking":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def mapped_bytes(self) -> int:
        """Bytes behind some address."""
        return len(self._mapped) * self.granule_bytes

    @property
    def committed_bytes(self) -> int:
        """Physical bytes taken from the system, mapped or pooled: what nvidia-smi or the resident set shows."""
        return self._created * self.granule_bytes

    @property
    def at_hand(self) -> int:
        """Granules that a `map` would find created."""
        return len(self._pooled)

    def address(self, plane: int, granule: int = 0) -> int:
        """Address of a granule; constant for the life of the backing."""
        return self._bases[plane] + granule * self.granule_bytes

    def map(self, runs: Sequence[Run]) -> None:
        """See Backing."""
        self._require_owner()
        wanted = [granule for run in runs for granule in run.granules()]
        require_unmapped(wanted, self._mapped, self.plane_granules)
        handles = self._take(len(wanted))
        recycled = set(handles) - self._clean
        self._clean.difference_update(handles)
        done: list[tuple[Granule, int]] = []
        try:
            for granule, handle in zip(wanted, handles, strict=True):
                self.driver.map(self.address(*granule), self.granule_bytes, handle)
                done.append((granule, handle))
            for run in runs:
                self.driver.allow(self.address(run.plane, run.first), run.length * self.granule_bytes)
            # Bytes of a state read as KV are NaN here and there, and attention may multiply what it masks by zero.
            self.driver.zero([self.address(*at) for at, handle in done if handle in recycled], self.granule_bytes)
        except HybridError as error:
            self._undo_map(done, handles, error)
            raise
        self._mapped.update(done)
        if self.on_taken is not None:
            self.on_taken()

    def unmap(self, runs: Sequence[Run]) -> None:
        """See Backing. Waits first for work that may still touch the granules."""
        self._require_owner()
        unwanted = [granule for run in runs for granule in run.granules()]
        require_mapped(unwanted, self._mapped)
        if not unwanted:
            return
        self.driver.synchronize()
        done: list[tuple[Granule, int]] = []
        try:
            for granule in unwanted:
                handle = self._mapped[granule]
                self.driver.unmap(self.address(*granule), self.granule_bytes, handle)
                done.append((granule, handle))
        except HybridError as error:
            self._undo_unmap(done, error)
            raise
        for granule, _ in done:
            del self._mapped[granule]
        with self._lock:
            self._pooled += [handle for _, handle in done]

    def prefault(self, pooled: int) -> int:
        """Create physical granules until `pooled` are at hand or `limit` is reached; return how many were created.

        Safe on another thread; the critical path then only maps. Raises PoolExhausted when the machine runs out.
        """
        self._require_owner()
        created = 0
        while True:
            with self._creating:
                if len(self._pooled) >= pooled or self._created >= self.limit:
                    return created
                self._create()
            created += 1

    def trim(self, keep: int) -> int:
        """See Backing."""
        self._require_owner()
        given = 0
        while True:
            with self._lock:
                if len(self._pooled) <= keep:
                    return given
                handle = self._pooled.pop(0)
                self._clean.discard(handle)
            self.driver.release(handle, self.granule_bytes)
            with self._lock:
                self._created -= 1
            given += 1

    def close(self) -> None:
        """Unmap everything, release memory and addresses. Idempotent; tensors over the ranges are dead after it."""
        if self._closed:
            return
        if self._mapped:
            self.unmap([Run(plane, granule, 1) for plane, granule in self._mapped])
        self.trim(0)
        self._closed = True
        while self._ranges:
            self.driver.free_reservation(*self._ranges.pop())

    def check(self) -> None:
        """Raise InvariantError unless every created handle is either mapped once or pooled once."""
        handles = [*self._mapped.values(), *self._pooled]
        if len(handles) != self._created or len(set(handles)) != len(handles) or self._created > self.limit:
            raise InvariantError(f"physical granules leaked or doubled: {self._created} created, {len(handles)} known")

    def _take(self, count: int) -> list[int]:
        with self._lock:
            if len(self._pooled) >= count:
                return [self._pooled.pop() for _ in range(count)]
        with self._creating:  # a creation under way on another thread ends first, so the count is exact
            short = count - len(self._pooled)
            if self._created + short > self.limit:
                raise PoolExhausted(f"unmap granules first; the backing may hold {self.limit}: {self._created + short}")
            for _ in range(short):
                self._create_at_need()
            with self._lock:
                return [self._pooled.pop() for _ in range(count)]

    def _create_at_need(self) -> None:
        """`_create`, once more if that failed but memory could be reclaimed.

        The thread that creates ahead does not reclaim: that waits for the device, and nobody needs the memory yet.
        """
        try:
            self._create()
        except PoolExhausted:
            if not self.driver.reclaim():
                raise
            self.reclaimed += 1
            self._create()

    def _create(self) -> None:
        handle = self.driver.create(self.granule_bytes)
        with self._lock:
            self._pooled.append(handle)
            if self.driver.creates_zeros:
                self._clean.add(handle)
            self._created += 1

    def _undo_map(self, done: Sequence[tuple[Granule, int]], handles: Sequence[int], error: HybridError) -> None:
        """Unmap `done` and pool all `handles` again; what cannot be unmapped stays on the books as mapped."""
        stuck = {}
        for granule, handle in done:
            try:
                self.driver.unmap(self.address(*granule), self.granule_bytes, handle)
            except HybridError:
                stuck[granule] = handle
        self._mapped.update(stuck)
        with self._lock:
            self._pooled += [handle for handle in reversed(handles) if handle not in stuck.values()]
        if stuck:
            raise InvariantError(f"a failed map could not be undone; stop using the backing: {len(stuck)}") from error

    def _undo_unmap(self, done: Sequence[tuple[Granule, int]], error: HybridError) -> None:
        """Map `done` again; what cannot be mapped is on the books as unmapped."""
        lost, closed = {}, 0
        for granule, handle in done:
            try:
                self.driver.map(self.address(*granule), self.granule_bytes, handle)
            except HybridError:
                lost[granule] = handle
                continue
            try:
                self.driver.allow(self.address(*granule), self.granule_bytes)
            except HybridError:
                closed += 1  # mapped, but nobody may touch it
        for granule in lost:
            del self._mapped[granule]
        with self._lock:
            self._pooled += lost.values()
        if lost or closed:
            count = len(lost) + closed
            raise InvariantError(f"a failed unmap could not be undone; stop using the backing: {count}") from error

    def _require_owner(self) -> None:
        if os.getpid() != self._owner_pid:
            raise ConfigError(f"create the backing in the process that uses it (spawn, not fork): {os.getpid()}")
        if self._closed:
            raise InvariantError("the backing is closed; create a new one: 0 ranges")
