"""Our policy under the paper's replay: the same requests, admitted whole or refused, and never robbed."""

from collections import Counter
from collections.abc import Callable

from avmp.demand import Demand, Growth
from avmp.elastic import Elastic
from avmp.geometry import Geometry
from avmp.lease import Lease
from avmp.limits import LimitedBudget
from avmp.workloads import Request
from sglang_hybrid.core.errors import ConfigError, PoolExhausted
from sglang_hybrid.memory.backing import LedgerBacking
from sglang_hybrid.memory.layout import Layout, Planes, first_planes

Layouts = Callable[[Geometry, int, int], list[Layout]]


def per_layer_pages(geometry: Geometry, total_bytes: int, granule_bytes: int) -> list[Layout]:
    """The paper's units: every KV page and every state block of a layer is a page of its own, placed anywhere."""
    kv = Layout("kv", (Planes("kv", 1, geometry.kv_page_bytes),), total_bytes // geometry.kv_page_bytes, granule_bytes)
    state_slots = total_bytes // geometry.state_block_bytes
    return [kv, Layout("state", (Planes("state", 1, geometry.state_block_bytes),), state_slots, granule_bytes)]


def layer_major(geometry: Geometry, total_bytes: int, granule_bytes: int) -> list[Layout]:
    """What unchanged kernels need: K and V of each layer, and the states of each layer, are tensors of their own."""
    token_bytes = geometry.kv_page_bytes // geometry.page_tokens // 2
    pages = total_bytes // (geometry.kv_page_bytes * geometry.kv_layers)
    tokens = pages * geometry.page_tokens
    planes = Planes("kv", 2 * geometry.kv_layers, token_bytes)
    kv = Layout("kv", (planes,), tokens, granule_bytes, page_slots=geometry.page_tokens)
    states = Planes("state", geometry.state_layers, geometry.state_block_bytes)
    slots = total_bytes // (geometry.state_layers * geometry.state_block_bytes)
    return [kv, Layout("state", (states,), slots, granule_bytes)]


def page_major(geometry: Geometry, total_bytes: int, granule_bytes: int) -> list[Layout]:
    """All layers of a page, and all layers of a state, side by side: one plane each, so a column is one granule.

    SGLang's unified memory pool lays its pages out this way and serves them to unchanged kernels as strided views.
    A state need not divide the granule: two states may share one.
    """
    page_bytes = geometry.kv_page_bytes * geometry.kv_layers
    kv = Layout("kv", (Planes("kv", 1, page_bytes),), total_bytes // page_bytes, granule_bytes, straddle=True)
    state_bytes = geometry.state_layers * geometry.state_block_bytes
    states = Planes("state", 1, state_bytes)
    return [kv, Layout("state", (states,), total_bytes // state_bytes, granule_bytes, straddle=True)]


class ElasticReplay:
    """Allocator (see `avmp.published`) and queue server over Elastic with `layouts`."""

    def __init__(
        self,
        geometry: Geometry,
        total_bytes: int,
        layouts: Layouts = layer_major,
        granule_bytes: int = 2 << 20,
        lockstep: bool = True,
    ) -> None:
        self.geometry = geometry
        self.killed: set[int] = set()
        self.counters: Counter[str] = Counter()
        chosen = layouts(geometry, total_bytes, granule_bytes)
        self._lockstep = lockstep
        self._pages_apart = layouts is per_layer_pages
        backing = LedgerBacking([size for layout in chosen for size in layout.plane_granules])
        self.budget = LimitedBudget(total_bytes, granule_bytes, backing)
        for layout, first in zip(chosen, first_planes(chosen), strict=True):
            self.budget.add_pool(layout, first)
        self.elastic = Elastic(self.budget)
        self.peak_mapped = 0
        self._leases: dict[int, Lease] = {}

    @property
    def reserved_bytes(self) -> int:
        """Most physical memory mapped at any time."""
        return self.peak_mapped * self.budget.granule_bytes

    def demand(self, request: Request) -> Demand:
        """Pages `request` needs at once and as it grows."""
        pages = self.geometry.pages(request.prompt)
        more = self.geometry.pages(request.prompt + request.gen) - pages
        growth = None
        each = self.geometry.kv_layers if self._pages_apart else 1
        if self._lockstep:
            page_tokens = self.geometry.page_tokens
            growth = Growth(pages * page_tokens + 1, page_tokens, request.prompt + request.gen, at_once=each)
        states = self.geometry.state_layers if self._pages_apart else 1
        return Demand({"kv": pages * each, "state": states}, {"kv": more * each}, growth)

    def start(self, request: Request, tick: int) -> bool | None:
        """Admit `request` at `tick`: True if it runs, False if it must wait, None if it can never run."""
        self.elastic.step = tick
        try:
            self._leases[request.request_id] = self.elastic.admit(request.request_id, self.demand(request))[0]
        except PoolExhausted:
            return False
        except ConfigError:
            return None
        self.peak_mapped = max(self.peak_mapped, self.budget.mapped)
        return True

    def end(self, request: Request) -> None:
        """End a running request."""
        self.elastic.finish(self._leases.pop(request.request_id))

    def arrive(self, request: Request) -> int:
        """See Allocator; a refused request counts as one failing call."""
        return 0 if self.start(request, request.arrival) else 1

    def grow(self, request: Request, tick: int) -> int:
        """See Allocator; cannot fail, the pages were promised."""
        lease = self._leases.get(request.request_id)
        if lease is not None:
            self.elastic.step = tick
            count = self.geometry.kv_layers if self._pages_apart else 1
            self.elastic.extend(lease, "kv", count)
            self.peak_mapped = max(self.peak_mapped, self.budget.mapped)
        return 0

    def depart(self, request: Request) -> None:
        """See Allocator."""
        if request.request_id in self._leases:
            self.end(request)
