"""A server's cache over a trace: two pools of fixed size and the decisions of `prefix/serving.py`, without an engine.

It plays what SGLang does with them, one request at a time: slots for the running request, states on a grid, eviction
when a pool is short. `open_cache` has one budget for both kinds and states anywhere.
"""

from typing import NamedTuple

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.cache import candidate
from sglang_hybrid.prefix.candidates import VictimIndex
from sglang_hybrid.prefix.lru import RecencyQueues
from sglang_hybrid.prefix.node import Node
from sglang_hybrid.prefix.serving import Arrival, Decisions, Pool
from sglang_hybrid.prefix.tokens import Tokens, as_tokens
from sglang_hybrid.prefix.tree import RadixTree
from sglang_hybrid.prefix.tree_check import check as check_tree

STATE_SHARE = 0.9 / 1.9  # of the memory goes to states: SGLang's default of --mamba-full-memory-ratio
RUNNING_SLOTS = 3  # a running request's state and the two that its checkpoints alternate between
GRID = 64
_POOLS = (Pool.STATES, Pool.KV)


class PoolPolicy(NamedTuple):
    """How two pools are managed: admission and eviction of `Decisions`, with its guard or without, or LRU."""

    admission: str
    eviction: str
    lru: bool = False
    guarded: bool = True


POOL_POLICIES = {
    "pools:lru": PoolPolicy("marconi", "forecast", lru=True),
    "pools:recency": PoolPolicy("judicious", "forecast", lru=True),
    "pools:marconi": PoolPolicy("judicious", "marconi"),
    "pools:forecast-unguarded": PoolPolicy("judicious", "forecast", guarded=False),
    "pools:forecast": PoolPolicy("judicious", "forecast"),
}


class TwoPools:
    """`states` slots and `kv_tokens` of KV for `model`."""

    def __init__(self, model: ModelSpec, states: int, kv_tokens: int, policy: PoolPolicy, guarded: bool = True) -> None:
        if states <= RUNNING_SLOTS:
            raise ConfigError(f"a running request takes {RUNNING_SLOTS} slots, give it more: {states}")
        self._states, self._kv_tokens = states, kv_tokens
        self._model = model
        self.decisions = Decisions(
            model, policy.admission, policy.eviction, grid=GRID, guarded=guarded and policy.guarded and not policy.lru
        )
        self._lru: dict[Pool, VictimIndex] | None = {pool: RecencyQueues() for pool in _POOLS} if policy.lru else None
        self.tree: RadixTree = RadixTree()
        self._evictable: dict[Pool, dict[int, Node]] = {pool: {} for pool in _POOLS}
        self._requests = 0

    def used_bytes(self) -> int:
        """Bytes of KV and states held, those of a running request not counted."""
        return self.tree.kv_tokens * self._model.kv_bytes_per_token + self.tree.states * self._model.checkpoint_bytes

    def lookup(self, tokens: Tokens, now: float) -> int:
        """Tokens a prefill of `tokens` can skip."""
        return self.tree.match(as_tokens(tokens), len(tokens) - 1).restart_tokens

    def commit(self, tokens: Tokens, n_input: int, now: float, boundaries: tuple[int, ...] = ()) -> object:
        """Serve the request `tokens`, input and output."""
        tokens = as_tokens(tokens)
        prompt = tokens[:n_input]
        found = self.tree.match(prompt, n_input - 1)
        start, restart = found.restart_tokens, found.restart
        self._requests += 1
        name, decisions = str(self._requests), self.decisions
        self.tree.lock(restart)
        arrival = decisions.arrive(name, prompt, now, start, max(start, found.kv_tokens), None, boundaries)
        self._use(restart, arrival)
        held, tip = restart, None
        if self._make_room(RUNNING_SLOTS, n_input - start, now):
            places = self._places(arrival, start, n_input)
            while places and not self._make_room(RUNNING_SLOTS + len(places), n_input - start, now):
                places.pop(min(places))
            held, tip = self._save(name, arrival, tokens, places, restart, now)
        decisions.computed(name)
        end = len(tokens) // GRID * GRID
        self._make_room(RUNNING_SLOTS + 1, len(tokens) - held.end, now)
        decisions.finish(name, arrival, tokens, now, max(end, held.end))
        if end > held.end and self._make_room(1, len(tokens) - held.end, now):
            self.tree.unlock(held)
            held, _ = self._save(name, arrival, tokens, {end: end}, None, now)
            self._supersede(tip, held, now)
        self.tree.unlock(held)
        return None

    def _places(self, arrival: Arrival, start: int, n_input: int) -> dict[int, int]:
        """Where states are saved on the grid, each with the position that it stands for."""
        places = {}
        for wanted in arrival.positions:
            at = wanted // GRID * GRID
            if at > start:
                places[at] = wanted
        tail = n_input // GRID * GRID  # SGLang saves that one by itself
        if tail > start:
            places[tail] = n_input
        return places

    def _save(
        self, name: str, arrival: Arrival, tokens: Tokens, places: dict[int, int], above: Node | None, now: float
    ) -> tuple[Node, Node | None]:
        """Save states at `places`; what is locked afterwards in place of `above`, and the node of the request's end."""
        tip = None
        if not places:
            assert above is not None
            return above, tip
        leaf = self.tree.insert(tokens[: max(places)], now)
        self.tree.lock(leaf)
        for at in sorted(places):
            node = leaf if at == leaf.end else self.tree.node_at(leaf, at)
            last = places[at] >= max(arrival.positions, default=0)
            if node.state is None:
                mark = arrival.tip if last else self.decisions.mark(arrival, places[at], now)
                mark.lost = False
                self.tree.attach(node, mark)
                tip = node if last else tip
            if node.state is not None:
                self.decisions.touch(node.state)
        self.decisions.saved(name, arrival, sorted(places))
        if above is not None:
            self.tree.unlock(above)
        return leaf, tip

    def _use(self, restart: Node, arrival: Arrival) -> None:
        """The request restarts at `restart`: that may turn out to be a branch; LRU may restart above it."""
        if restart.state is not None:
            restart.state = self.decisions.branch(arrival, restart.end, restart.state) or restart.state
        for at in self.decisions.uses(arrival, restart.end):
            node: Node | None = restart
            while node is not None and node.end > at:
                node = node.parent
            if node is not None and node.end == at and node.state is not None:
                self.decisions.touch(node.state)
                self.tree.changed[node.id] = node

    def _supersede(self, earlier: Node | None, later: Node, now: float) -> None:
        if earlier is None or earlier is later or earlier.parent is None or earlier.state is None:
            return
        old = self.decisions.superseded(earlier.state, now)
        if old is not None:
            earlier.state = old
            self.tree.changed[earlier.id] = earlier

    def _make_room(self, states: int, kv_tokens: int, now: float) -> bool:
        """Evict until so much is free beside the tree; whether it is. What no pool could hold evicts nothing."""
        most = {Pool.STATES: self._states - states, Pool.KV: self._kv_tokens - kv_tokens}
        if min(most.values()) < 0:
            return False
        tree, decisions = self.tree, self.decisions
        if tree.states > most[Pool.STATES] or tree.kv_tokens > most[Pool.KV]:
            decisions.fit(most[Pool.STATES], most[Pool.KV])
        for pool in _POOLS:
            while (tree.states if pool is Pool.STATES else tree.kv_tokens) > most[pool]:
                self._reindex()
                victim = decisions.victim(pool, now) if self._lru is None else self._lru[pool].pop(now)
                if victim is None:
                    return False
                node = self._evictable[pool].pop(victim)
                if node.state is not None:
                    decisions.evicted(node.state)
                tree.drop(node)
        return True

    def _reindex(self) -> None:
        tree = self.tree
        stack = list(tree.rebased.values())
        while stack:
            node = stack.pop()
            tree.changed[node.id] = node
            if node.state is None:
                stack.extend(node.children.values())
        for pool in _POOLS:
            known = self._evictable[pool]
            index: VictimIndex | None = None if self._lru is None else self._lru[pool]
            for node in tree.changed.values():
                free = node.parent is not None and not node.locks and node.state is not None
                if free and (pool is Pool.STATES or not node.children):
                    known[node.id] = node
                    if index is None:
                        self.decisions.put(pool, candidate(node))
                    else:
                        index.put(candidate(node))
                elif known.pop(node.id, None) is not None:
                    if index is None:
                        self.decisions.discard(pool, node.id)
                    else:
                        index.discard(node.id)
        tree.rebased.clear()
        tree.changed.clear()

    def check(self) -> None:
        """Raise InvariantError where tree, indices or history disagree."""
        check_tree(self.tree)
        self.decisions.check()


def open_pools(policy: str, capacity_bytes: int, model: ModelSpec) -> TwoPools:
    """Two pools that share `capacity_bytes` as SGLang shares them; `policy` is a name of POOL_POLICIES."""
    if policy not in POOL_POLICIES:
        raise ConfigError(f"unknown policy of two pools, choose one of {', '.join(POOL_POLICIES)}: {policy!r}")
    states = int(capacity_bytes * STATE_SHARE) // model.checkpoint_bytes
    kv_tokens = int(capacity_bytes * (1.0 - STATE_SHARE)) // model.kv_bytes_per_token
    return TwoPools(model, states, kv_tokens, POOL_POLICIES[policy])
