"""Who gets memory when it is short: the least valuable unreferenced bytes go, of any kind; nobody who runs is robbed.

A request is admitted when all it needs for its next pass is *held*: pages of both kinds, their memory mapped. So the
allocations of the pass cannot fail, whoever else takes memory of the machine meanwhile.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from sglang_hybrid.memory.holdings import Holdings
from sglang_hybrid.memory.sizing import KV, SEGMENT, STATE

CHECKPOINTS = 2
"""States beyond its own that a pass may save; they are had if eviction can give them, and not waited for."""


class Claims(ABC):
    """What a scheduler asks of one budget for both kinds; whoever owns the cache says what is in it and evicts.

    `promised` are the pages of the requests that were admitted to the pass that is put together.
    """

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self.nothing_promised()

    @abstractmethod
    def evict_one(self, kinds: tuple[str, ...]) -> int:
        """Evict what is worth least per byte among `kinds`; bytes freed, 0 only if nothing can go."""

    @abstractmethod
    def evictable(self) -> dict[str, list[tuple[int, int]]]:
        """Pages of every kind that nobody reads, by (column, how many)."""

    @abstractmethod
    def evictable_states(self) -> int:
        """How many of them are states."""

    def evictable_blocks(self) -> int:
        """Blocks of segments that nobody reads."""
        return 0

    @abstractmethod
    def held(self) -> tuple[int, int]:
        """Tokens and states in the cache, in use or not."""

    @abstractmethod
    def leave(self, share: float) -> None:
        """So large a `share` of what the cache holds may stay, counted in bytes; the rest is to be evicted."""

    def nothing_promised(self) -> None:
        """Nobody is admitted yet, or who was has what it needs."""
        self.promised = {KV: 0, STATE: 0}

    def admit(self, pages: int, states: int) -> bool:
        """Hold what one more request of this pass needs, `pages` of KV and `states`, all of it or nothing."""
        need = {KV: self.promised[KV] + pages, STATE: self.promised[STATE] + states}
        held = self.secure({**need, STATE: need[STATE] + CHECKPOINTS}) or self.secure(need)
        if held:
            self.promised = need
        return held

    def clear_for(self, pages: int, states: int) -> None:
        """Evict for all of a request that has the machine to itself: forecasts of evictable memory are coarse."""
        self.holdings.release_held()
        self.evict_for({KV: pages, STATE: states + CHECKPOINTS})

    def has_state(self) -> bool:
        """Hold one state beside those promised to the pass if that evicts nothing; whether it is held."""
        need = {STATE: self.promised[STATE] + 1}
        return self.holdings.shortfall(need) == 0 and self.holdings.reserve(need)

    def secure_states(self, count: int) -> bool:
        """Hold `count` states beside those promised to the pass, evicting if need be; whether they are held."""
        states = self.holdings.supplies[STATE]
        need = self.promised[STATE] + count
        if states.at_hand >= need and states.reserve(need):
            return True
        return self.secure({STATE: need, KV: len(self.holdings.supplies[KV].held)})

    def spare_states(self) -> bool:
        """Whether states may be taken that nobody asked for: free memory and evictable states are the measure.

        Memory is always full of something; such a state displaces the least valuable bytes, soon another of its kind.
        """
        states = self.holdings.supplies[STATE]
        return states.available + self.evictable_states() > states.pool.layout.slots // 8 + 4

    def secure_decode(self, pages: int) -> bool:
        """Hold `pages` of KV for the next step of the running requests, who have first claim to what is evictable."""
        kv = self.holdings.supplies[KV]
        if kv.at_hand >= pages and kv.reserve(pages):
            return True
        self.holdings.supplies[STATE].release_held()
        return self._have({KV: pages}, lambda: self.evict_for({KV: pages}))

    def make_room(self, pages: int) -> None:
        """Evict until `pages` of KV could be had, or nothing is left to evict."""
        if self.holdings.supplies[KV].at_hand < pages:
            self.evict_for({KV: pages})

    def tokens_in_states(self) -> int:
        """Tokens of KV that would fit in place of what else is evictable, counted in whole columns."""
        sizing = self.holdings.sizing
        granules = self.evictable_states() // sizing.states_per_column * sizing.state_column_granules
        segments = self.holdings.supplies.get(SEGMENT)
        if segments is not None:
            columns = self.evictable_blocks() // segments.pool.layout.column_pages
            granules += columns * segments.pool.columns.column_granules
        return granules // sizing.kv_column_granules * sizing.kv_column_tokens

    def secure(self, need: dict[str, int]) -> bool:
        """Hold `need` of each kind and nothing else, evicting if that can give it; whether it is held."""
        holdings = self.holdings
        for name, supply in holdings.supplies.items():
            supply.release_held(need.get(name, 0))

        def room() -> bool:
            fits = holdings.shortfall(need) == 0
            return fits or (holdings.possible(need, self.evictable()) and self.evict_for(need))

        return self._have(need, room)

    def _have(self, need: dict[str, int], room: Callable[[], bool]) -> bool:
        """Hold `need` once there is `room` for it; whether it is held.

        A machine that others use may give less than the budget: then the cache has to leave as much.
        """
        if not room():
            return False
        if self.holdings.reserve(need):
            return True
        with self.holdings.closed():
            return room() and self.holdings.reserve(need)

    def evict_for(self, need: dict[str, int]) -> bool:
        """Evict one by one, the least valuable bytes first, until `need` fits.

        A kind that fills all of its addresses has to give some up itself: bytes of the others are no help. Where
        segments may leave in place of the cache, `evict_one` says what left that.
        """
        while (short := self.holdings.shortfall(need)) != 0:
            kinds = tuple(self.holdings.supplies) if short is not None else (self.holdings.crowded(need),)
            freed_bytes, wanted_bytes = 0, (short or 1) * self.holdings.sizing.granule_bytes
            if SEGMENT not in self.holdings.supplies:
                self.fit(wanted_bytes)
            while freed_bytes < wanted_bytes:
                freed = self.evict_one(kinds)
                if not freed:
                    return False
                freed_bytes += freed
        return True

    def fit(self, wanted_bytes: int) -> None:
        """Tell the decisions that `wanted_bytes` have to leave the cache."""
        (tokens, states), sizing = self.held(), self.holdings.sizing
        held_bytes = tokens * sizing.kinds.token_bytes + states * sizing.state_slot_bytes
        self.leave(max(0.0, 1.0 - wanted_bytes / max(1, held_bytes)))

    def room_made(self, freed_bytes: int, states: float) -> float:
        """States that have room in `freed_bytes`, which left `states` more free.

        Memory changes its kind by whole columns: KV of less makes no room for a state, but counts as a part.
        """
        sizing = self.holdings.sizing
        return max(freed_bytes / (sizing.state_column_granules * sizing.granule_bytes), states)
