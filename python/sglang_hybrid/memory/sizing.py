"""How large a granule, a slot and a reach must be for a KV pool and a state pool over one budget."""

import math
from dataclasses import dataclass

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.memory.layout import Layout, Planes

KV, STATE = "kv", "state"
"""Names of the two pools."""

_ALIGNMENT = 64  # bytes; what vector loads like
_MOST_GRANULES = 16384  # each may split the address space of a process in two; Linux allows 65,530 pieces


@dataclass(frozen=True)
class Kinds:
    """What the model stores: `kv_row_bytes` per token in each of `kv_planes` (K and V of every attention layer), in
    pages of `page_tokens`; `state_bytes` for one state over all layers."""

    kv_row_bytes: int
    kv_planes: int
    page_tokens: int
    state_bytes: int

    def __post_init__(self) -> None:
        if min(self.kv_row_bytes, self.kv_planes, self.page_tokens, self.state_bytes) < 1:
            raise ConfigError(f"elastic memory needs KV and recurrent states; add --hybrid-memory static: {self}")


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
        fitting = self.states_per_column
        if fitting > 1 or self.kinds.state_bytes <= self.granule_bytes:
            return self.granule_bytes // fitting
        return -(-self.kinds.state_bytes // self.granule_bytes) * self.granule_bytes

    @property
    def state_column_granules(self) -> int:
        """Granules of one column of states."""
        return self.states_per_column * self.state_slot_bytes // self.granule_bytes

    @property
    def kv_column_tokens(self) -> int:
        """Tokens of one column of KV."""
        return self.granule_bytes // self.kinds.kv_row_bytes

    @property
    def kv_column_granules(self) -> int:
        """Granules of one column of KV, over all its planes."""
        return self.kinds.kv_planes

    @property
    def waste(self) -> float:
        """Share of the budget lost to the rounding of states and to one half-used column of either kind."""
        held_bytes = self.states_per_column * self.kinds.state_bytes
        column_bytes = self.state_column_granules * self.granule_bytes
        half_used_bytes = (self.kv_column_granules + self.state_column_granules) * self.granule_bytes
        return 1.0 - held_bytes / column_bytes + half_used_bytes / self.total_bytes

    @property
    def tokens(self) -> int:
        """Tokens of KV that one request can hold beside its states, whole pages; the padding page not counted."""
        states = -(-(1 + self.request_states) // self.states_per_column) * self.state_column_granules
        columns = (self.total - states) // self.kv_column_granules
        return max(0, columns * self.kv_column_tokens - self.kinds.page_tokens)

    @property
    def states(self) -> int:
        """States that fit beside the smallest amount of KV; the padding slot not counted."""
        columns = (self.total - self.kv_column_granules) // self.state_column_granules
        return max(0, columns * self.states_per_column - 1)

    @property
    def kv_layout(self) -> Layout:
        """Layout of the KV pool. It has addresses for all of the budget, so that only memory can run short."""
        planes = (Planes(KV, self.kinds.kv_planes, self.kinds.kv_row_bytes),)
        slots = self.total // self.kv_column_granules * self.kv_column_tokens
        return Layout(KV, planes, slots, self.granule_bytes, self.kinds.page_tokens, pinned_pages=1)

    @property
    def state_layout(self) -> Layout:
        """Layout of the state pool, with addresses for all of the budget."""
        planes = (Planes(STATE, 1, self.state_slot_bytes),)
        slots = self.total // self.state_column_granules * self.states_per_column
        return Layout(STATE, planes, slots, self.granule_bytes, pinned_pages=1)


def choose(kinds: Kinds, total_bytes: int, base_bytes: int, request_states: int, least_bytes: int = 32 << 10) -> Sizing:
    """The granule, a multiple of `base_bytes` and of a page in every plane, that wastes least: in the rounding of a
    state, and in one half-used column of either kind.

    `request_states` are the states that one running request holds. Raises ConfigError if the budget does not hold a
    request with a page of KV.
    """
    unit = math.lcm(base_bytes, kinds.kv_row_bytes * kinds.page_tokens)
    floor = max(least_bytes, -(-total_bytes // _MOST_GRANULES))
    first = -(-floor // unit)
    candidates = [
        Sizing(kinds, multiple * unit, total_bytes, request_states)
        for multiple in range(first, max(first, 8 * floor // unit) + 1)
    ]
    sizing = min(candidates, key=lambda sizing: (sizing.waste, sizing.granule_bytes))
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
