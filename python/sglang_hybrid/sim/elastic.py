"""A simulated server whose KV and states share one budget of granules: `memory`'s own books, without memory."""

import math

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.memory.backing import LedgerBacking
from sglang_hybrid.memory.budget import Budget
from sglang_hybrid.memory.claims import Claims
from sglang_hybrid.memory.holdings import Holdings
from sglang_hybrid.memory.layout import first_planes
from sglang_hybrid.memory.meter import Meter
from sglang_hybrid.memory.sizing import KV, STATE, Sizing
from sglang_hybrid.memory.supply import PageSupply
from sglang_hybrid.prefix import policies
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.tree.check import walk
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.prefix.tree.tokens import Tokens
from sglang_hybrid.sim.ownership import Ownership
from sglang_hybrid.sim.running import Running
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.shape import Shape

_POOLS: dict[tuple[str, ...], PoolKind] = {(KV,): PoolKind.KV, (STATE,): PoolKind.STATES}


class ElasticServer(SimulatedServer):
    """A server of `shape` whose memory is sized as `sizing` says, instead of two pools.

    Every page has a number and an owner, for memory changes its kind by whole columns: which pages lie together
    decides how much has to leave.
    """

    def __init__(
        self,
        model: ModelSpec,
        shape: Shape,
        sizing: Sizing,
        policy: str | policies.Policy = policies.DEFAULT,
        guarded: bool = True,
    ) -> None:
        super().__init__(model, shape, policy, guarded, (PoolKind.STATES, PoolKind.KV, PoolKind.BYTES))
        if shape.page != sizing.kinds.page_tokens:
            raise ConfigError(f"give memory the server's pages of {shape.page} tokens: {sizing.kinds.page_tokens}")
        self.sizing = sizing
        self.claims = _Claims(self, _holdings(sizing))
        self._kv, self._state_slots = (self.claims.holdings.supplies[kind] for kind in (KV, STATE))
        self._owned = Ownership(self._kv, self._state_slots, shape.page)
        self.now = 0.0

    @property
    def free_states(self) -> int:
        """Slots that could be had without evicting anything."""
        return self._state_slots.available

    @property
    def free_tokens(self) -> int:
        """Tokens of KV that could be had without evicting anything."""
        return self._kv.available * self.shape.page

    def holds(self, tokens: int) -> bool:
        """Whether a request of so many tokens in all can ever run."""
        return tokens > 0 and self.shape.paged(tokens) + self.shape.page <= self.sizing.tokens

    def room_for(self, tokens: int) -> bool:
        """Whether a request of so many tokens in all can run beside those that do, whatever has to be evicted.

        Each of them may leave a column of either kind half used.
        """
        sizing, totals = self.sizing, [tokens, *[max(run.promised, run.computed) for run in self.running.values()]]
        columns = sum(-(-(total + self.shape.page) // sizing.kv_column_tokens) + 1 for total in totals)
        states = len(totals) * (2 + self.shape.buffers)  # with the one that is read
        state_columns = -(-states // sizing.states_per_column) + len(totals)
        return columns * sizing.kv_column_granules + state_columns * sizing.state_column_granules <= sizing.total

    def _match(self, run: Running, now: float) -> None:
        self.now = now
        if len(self.running) == 1:  # it was idle: its books are in order, and it holds nothing for anybody
            self.claims.holdings.release_held()
            self.claims.holdings.sort()
        self._owned.open(run.id)
        super()._match(run, now)
        assert run.held is not None
        self._owned.resume(run.id, run.held)

    def _admit(self, run: Running, end: int, now: float) -> None:
        claims, page = self.claims, self.shape.page
        claims.nothing_promised()
        states, whole = max(0, 1 + self.shape.buffers - run.slots), run.promised - run.computed
        if states and len(self.running) == 1:
            everything = self.free_tokens + self.tree.kv_tokens + claims.tokens_in_states()
            if whole + page >= everything:
                claims.clear_for(-(-whole // page) + 1, states)
        if not claims.admit(-(-(end - run.computed) // page) + 1, states):
            raise ConfigError(f"give the server a larger budget than {self.sizing.total_bytes} bytes, short at: {end}")
        self._take(run, states)
        self._own(run, self.shape.paged(end) - self.shape.paged(run.computed))

    def _reserve(self, run: Running, wanted_at: dict[int, int], now: float) -> dict[int, int]:
        kept = super()._reserve(run, wanted_at, now)
        assert run.request is not None
        for at in sorted(kept, reverse=True):
            if not self._owned.try_slot(run.id):
                self._refuse(run.request, kept, at)
        self.claims.nothing_promised()  # the pass has what it was promised
        return kept

    def _contest(self, contenders: dict[int, Candidate], short: int, now: float) -> list[int]:
        left, lost, missing = dict(contenders), [], float(short)
        while missing > 0 and left:
            victims, losers = self.weakest(PoolKind.BYTES, left, math.ceil(missing), now)
            for loser in losers:
                del left[loser]
                missing -= 1
            lost += losers
            if victims:
                made = self._evict_chosen(victims)
                if not made:
                    break
                missing -= made
        return lost

    def _evict_chosen(self, victims: list[Node]) -> float:
        """Evict `victims`; states that have room in what came free."""
        free, freed = self.free_states, 0
        for node in victims:
            self.claims.fit(self.sizing.state_slot_bytes)
            freed += self.evicted_bytes(node)
        return self.claims.room_made(freed, float(self.free_states - free))

    def evicted_bytes(self, node: Node) -> int:
        """Evict `node`; the bytes that this frees."""
        tokens, states = self.tree.kv_tokens, self.tree.states
        self.evict(node)
        freed_kv_bytes = (tokens - self.tree.kv_tokens) * self.sizing.kinds.token_bytes
        return freed_kv_bytes + (states - self.tree.states) * self.sizing.state_slot_bytes

    def evict(self, node: Node) -> None:
        """See TreeCache; what it held is free."""
        goes = not node.children and not node.locks
        if node.state is not None:
            self._owned.drop_state(node)
        super().evict(node)
        if goes:
            self._owned.drop_kv(node)

    def evictable_pages(self) -> dict[str, list[tuple[int, int]]]:
        """Pages of both kinds that nobody reads, by (column, how many)."""
        nodes = self._nodes()
        states = [node for node in nodes if node.state is not None and not self._states_in_use[node.id]]
        pools, ids = self.claims.holdings.budget.pools, self._owned.ids([n for n in nodes if not n.locks], states)
        return {kind: list(pools[kind].count_by_column(ids[kind])) for kind in ids}

    def evictable_states(self) -> int:
        """States that nobody reads."""
        return self.tree.states - len(self._states_in_use)

    def _has_spare(self) -> bool:
        return self.claims.spare_states()

    def _save_pass(self, run: Running, last: bool, now: float) -> None:
        super()._save_pass(run, last, now)
        self._owned.trim_slots(run.id, run.slots)  # those of states that were there already

    def _split(self, upper: Node) -> None:
        self._owned.split(upper)

    def _donate(self, run: Running) -> None:
        self._owned.take_slots(run.id, 1)

    def _keep(self, run: Running, leaf: Node) -> None:
        self._owned.insert(run.id, leaf)
        if run.held is None or leaf.end > run.held.end:
            self._owned.share(run.id, leaf)
        super()._keep(run, leaf)

    def _attach(self, run: Running, leaf: Node, mark: Mark) -> None:
        self._owned.attach(run.id, leaf)
        super()._attach(run, leaf, mark)

    def _decode(self, run: Running, tokens: int, now: float) -> None:
        self.now, page = now, self.shape.page
        while tokens > 0:
            if not run.computed % page:
                if not self.claims.secure_decode(1):
                    raise ConfigError(f"give the server a larger budget, requests fill it: {self.sizing.total_bytes}")
                self._own(run, page)
                run.computed, tokens = run.computed + 1, tokens - 1
            some = min(tokens, -run.computed % page)
            if some:
                self.claims.make_room(1)  # SGLang asks for a page at every step
            run.computed, tokens = run.computed + some, tokens - some

    def finish(self, request_id: str, tokens: Tokens, now: float) -> None:
        """See SimulatedServer."""
        self.now = now
        super().finish(request_id, tokens, now)
        self._owned.close(request_id)

    def _states(self, count: int, now: float) -> bool:
        self.now = now
        return (count == 1 and self.claims.has_state()) or self.claims.secure_states(count)

    def _take(self, run: Running, slots: int) -> None:
        super()._take(run, slots)
        if slots > 0:  # those that it gives back at its end it keeps until they are inserted
            self._owned.take_slots(run.id, slots)

    def _own(self, run: Running, tokens: int) -> None:
        super()._own(run, tokens)
        if tokens > 0:  # what is less is the tree's, or given back at the end
            self._owned.take_kv(run.id, tokens)

    def check(self) -> None:
        """See TreeCache; every page belongs to one node or one request, and the budget adds up."""
        super().check()
        self.claims.holdings.budget.check()
        self._owned.check(self._nodes())

    def _nodes(self) -> list[Node]:
        return [node for node in walk(self.tree) if node.parent is not None]


class _Claims(Claims):
    """The cache of `server` is what can be evicted."""

    def __init__(self, server: ElasticServer, holdings: Holdings) -> None:
        super().__init__(holdings)
        self._server = server

    def evict_one(self, kinds: tuple[str, ...]) -> int:
        node = self._server.victim(_POOLS.get(kinds, PoolKind.BYTES), self._server.now)
        return 0 if node is None else self._server.evicted_bytes(node)

    def evictable(self) -> dict[str, list[tuple[int, int]]]:
        return self._server.evictable_pages()

    def evictable_states(self) -> int:
        return self._server.evictable_states()

    def held(self) -> tuple[int, int]:
        return self._server.tree.kv_tokens, self._server.tree.states

    def leave(self, share: float) -> None:
        self._server.decisions.fit(held_bytes=int(self._server.used_bytes() * share))


def _holdings(sizing: Sizing) -> Holdings:
    """The books of a budget in which nothing is used yet."""
    layouts = (sizing.state_layout, sizing.kv_layout)
    backing = LedgerBacking([granules for layout in layouts for granules in layout.plane_granules])
    holdings = Holdings(sizing, Budget(sizing.total_bytes, sizing.granule_bytes, backing), lambda: 0.0)
    for layout, first_plane in zip(layouts, first_planes(layouts), strict=True):
        pool = holdings.budget.add_pool(layout, first_plane)
        holdings.supplies[layout.name] = PageSupply(holdings.budget, pool, holdings.tidy, Meter(lambda: 0.0))
    return holdings
