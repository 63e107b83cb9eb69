"""How large a granule, a slot and a reach must be for a KV pool and a state pool over one budget."""

import math
from dataclasses import dataclass

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import MAMBA_FULL_MEMORY_RATIO
from sglang_hybrid.memory.layout import Layout, Planes

KV, STATE, SEGMENT = "kv", "state", "segment"
"""Names of the pools; the third exists where segments share the budget."""

_ALIGNMENT = 64  # bytes; what vector loads like
_ROUNDING = 0.1  # of a column of states; to save as much, columns of KV take more granules, each a call of the driver


@dataclass(frozen=True)
class Grain:
    """Which granules a machine maps well: multiples of `base_bytes`, from `least_bytes` to `most_bytes`.

    There may be `most_granules` in a budget, which comes first. As far as it allows, a column of KV is no larger than
    `column_bytes`: it is mapped in one piece while a request waits.
    """

    base_bytes: int
    least_bytes: int
    most_granules: int
    most_bytes: int | None = None
    column_bytes: int | None = None

    def sizes(self, unit_bytes: int, total_bytes: int, kv_planes: int) -> range:
        """Multiples of `unit_bytes` to choose a granule from, for a budget and so many planes of KV; at least one."""
        least = max(self.least_bytes, -(-total_bytes // self.most_granules))
        most = 8 * least if self.most_bytes is None else self.most_bytes
        if self.column_bytes is not None:
            most = min(most, self.column_bytes // kv_planes)
        first = -(-least // unit_bytes) * unit_bytes
        return range(first, max(first, most) + 1, unit_bytes)


HOST = Grain(base_bytes=4096, least_bytes=32 << 10, most_granules=16384)
"""A granule on its own splits the address space of a process in two more pieces, of which Linux allows 65,530."""

CUDA = Grain(2 << 20, 2 << 20, most_granules=1 << 16, most_bytes=8 << 20, column_bytes=200 << 20)
"""Nothing of the kind on a GPU, where a granule costs its driver calls: some 60 us to unmap and release one, whatever
its size, so four seconds to give 65,536 back. A column of KV costs the same calls with small granules as with large."""


@dataclass(frozen=True)
class Kinds:
    """What the model stores: `kv_row_bytes` per token in each of `kv_planes` (K and V of every attention layer, or its
    latent), in pages of `page_tokens`; `state_bytes` for one state over all layers."""

    kv_row_bytes: int
    kv_planes: int
    page_tokens: int
    state_bytes: int

    def __post_init__(self) -> None:
        if min(self.kv_row_bytes, self.kv_planes, self.page_tokens, self.state_bytes) < 1:
            raise ConfigError(f"elastic memory needs KV and recurrent states; add --hybrid-memory static: {self}")

    @property
    def page_bytes(self) -> int:
        """A page in one plane."""
        return self.kv_row_bytes * self.page_tokens

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.kv_row_bytes * self.kv_planes


@dataclass(frozen=True)
class Sizing:
    """A granule for `kinds` and the layouts that follow from it.

    KV is layer-major, as attention kernels want it; all layers of a state lie side by side, so that a state costs
    whole granules and wastes at most the rounding of one. No two columns share a granule.
    """

    kinds: Kinds
    granule_bytes: int
    total_bytes: int
    request_states: int
    reserved: int = 0
    """Granules that something else may hold while a request runs that has all the rest."""

    @property
    def total(self) -> int:
        """Granules of the budget."""
        return self.total_bytes // self.granule_bytes

    @property
    def states_per_column(self) -> int:
        """States of one column."""
        return _states_per_column(self.kinds.state_bytes, self.granule_bytes)

    @property
    def state_slot_bytes(self) -> int:
        """Distance between two states."""
        return slot_bytes(self.kinds.state_bytes, self.granule_bytes)

    @property
    def state_column_granules(self) -> int:
        """Granules of one column of states."""
        return self.states_per_column * self.state_slot_bytes // self.granule_bytes

    @property
    def kv_run(self) -> int:
        """Granules of one column of KV in each plane: the fewest that hold whole pages."""
        return math.lcm(self.granule_bytes, self.kinds.page_bytes) // self.granule_bytes

    @property
    def kv_column_tokens(self) -> int:
        """Tokens of one column of KV."""
        return self.kv_run * self.granule_bytes // self.kinds.kv_row_bytes

    @property
    def kv_column_granules(self) -> int:
        """Granules of one column of KV, over all its planes."""
        return self.kv_run * self.kinds.kv_planes

    @property
    def kv_column_bytes(self) -> int:
        """One column of KV, over all its planes."""
        return self.kv_column_granules * self.granule_bytes

    @property
    def rounding(self) -> float:
        """Share of a column of states that no state lies in."""
        held_bytes = self.states_per_column * self.kinds.state_bytes
        return 1.0 - held_bytes / (self.state_column_granules * self.granule_bytes)

    @property
    def waste(self) -> float:
        """Share of the budget lost to the rounding of states and to one half-used column of either kind."""
        half_used_bytes = (self.kv_column_granules + self.state_column_granules) * self.granule_bytes
        return self.rounding + half_used_bytes / self.total_bytes

    @property
    def tokens(self) -> int:
        """Tokens of KV that one request can hold beside its states, whole pages; the padding page not counted."""
        states = -(-(1 + self.request_states) // self.states_per_column) * self.state_column_granules
        columns = (self.total - self.reserved - states) // self.kv_column_granules
        return max(0, columns * self.kv_column_tokens - self.kinds.page_tokens)

    @property
    def states(self) -> int:
        """States that fit beside the smallest amount of KV; the padding slot not counted."""
        columns = (self.total - self.reserved - self.kv_column_granules) // self.state_column_granules
        return max(0, columns * self.states_per_column - 1)

    @property
    def host_tokens(self) -> int:
        """Tokens in a second tier of as many bytes as the budget, which is split as SGLang splits two pools."""
        return int(self.tokens / (1 + MAMBA_FULL_MEMORY_RATIO))

    @property
    def host_states(self) -> int:
        """States in the rest of such a tier."""
        return int(self.states * MAMBA_FULL_MEMORY_RATIO / (1 + MAMBA_FULL_MEMORY_RATIO))

    @property
    def kv_layout(self) -> Layout:
        """Layout of the KV pool. It has addresses for all of the budget, so that only memory can run short."""
        planes = (Planes(KV, self.kinds.kv_planes, self.kinds.kv_row_bytes),)
        slots = self.total // self.kv_column_granules * self.kv_column_tokens
        return Layout(KV, planes, slots, self.granule_bytes, self.kinds.page_tokens, pinned_pages=1, run=self.kv_run)

    @property
    def state_layout(self) -> Layout:
        """Layout of the state pool, with addresses for all of the budget."""
        planes = (Planes(STATE, 1, self.state_slot_bytes),)
        slots = self.total // self.state_column_granules * self.states_per_column
        return Layout(STATE, planes, slots, self.granule_bytes, pinned_pages=1)


def segment_layout(block_bytes: int, granule_bytes: int, limit_bytes: int) -> Layout:
    """Layout of a pool of blocks of segments, with addresses for `limit_bytes`; `block_bytes` as `slot_bytes` has it.

    Block 0 is nobody's: kernels read it where a row follows no segment, and do not use what they find. Raises
    ConfigError if there is no block for states and one for KV beside it.
    """
    column_bytes = -(-block_bytes // granule_bytes) * granule_bytes
    slots = limit_bytes // column_bytes * (column_bytes // block_bytes)
    if slots < 3:
        raise ConfigError(
            f"segments need at least {3 * column_bytes / 1e9:.3f} GB, a block for states, for KV and for nobody; raise "
            f"--hybrid-segment-memory-gb or the budget: {limit_bytes / 1e9:.3f}"
        )
    return Layout(SEGMENT, (Planes(SEGMENT, 1, block_bytes),), slots, granule_bytes, pinned_pages=1)


def slot_bytes(held_bytes: int, granule_bytes: int) -> int:
    """Distance between two slots of `held_bytes`, so that none crosses the boundary of a column of whole granules."""
    fitting = _states_per_column(held_bytes, granule_bytes)
    if fitting > 1 or held_bytes <= granule_bytes:
        return granule_bytes // fitting
    return -(-held_bytes // granule_bytes) * granule_bytes


def choose(kinds: Kinds, total_bytes: int, grain: Grain, request_states: int) -> Sizing:
    """The granule that wastes least among those of `grain` that hold whole pages in every plane: in the rounding of a
    state, and in one half-used column of either kind. Rows of odd sizes need granules so large that states are rounded
    up by a lot; where another one saves a tenth of that, a column of KV, no larger, takes several granules of a plane.

    `request_states` are the states that one running request holds. Raises ConfigError if the budget does not hold a
    request with a page of KV.
    """

    def candidates(unit_bytes: int) -> list[Sizing]:
        sizes = grain.sizes(unit_bytes, total_bytes, kinds.kv_planes)
        return [Sizing(kinds, granule_bytes, total_bytes, request_states) for granule_bytes in sizes]

    def least(found: list[Sizing]) -> Sizing:
        return min(found, key=lambda sizing: (sizing.waste, sizing.granule_bytes))

    sizing = least(candidates(math.lcm(grain.base_bytes, kinds.page_bytes)))
    if sizing.rounding > _ROUNDING:
        others = [
            other
            for other in candidates(grain.base_bytes)
            if other.rounding < sizing.rounding - _ROUNDING and other.kv_column_bytes <= sizing.kv_column_bytes
        ]
        sizing = least(others or [sizing])
    if sizing.tokens < kinds.page_tokens or sizing.states < request_states:
        needed = sizing.state_column_granules * (1 + request_states) + 2 * sizing.kv_column_granules
        raise ConfigError(
            f"the budget does not hold one request, which takes {request_states} states; raise it to "
            f"{needed * sizing.granule_bytes:,} bytes or more (--hybrid-cpu-memory-gb on a CPU): {total_bytes:,}"
        )
    return sizing


def _states_per_column(state_bytes: int, granule_bytes: int) -> int:
    fitting = granule_bytes // state_bytes
    while fitting > 1 and granule_bytes % (fitting * _ALIGNMENT):
        fitting -= 1
    return max(fitting, 1)
