"""Keeps the victim indices of `Decisions` true to SGLang's tree: a node that changed is priced when asked."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from sglang_hybrid.prefix.decisions import Decisions
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.tree.mark import Kind, Mark

_BACKLOG = 1024  # nodes that wait for another pool to be asked
_FEW = 8  # of them are priced at once
_REPRICED = 64  # descendants of a changed state that are priced again; the rest keeps an older price


class Victims:
    """The evictable nodes of one tree core.

    A node of SGLang's tree carries two attributes of ours: `hybrid_mark`, the Mark of its state (None once that is
    gone), and `hybrid_end`, its depth in tokens, which never changes. `pools` are those that victims are asked of.
    Without `watches` nothing is remembered: the order is SGLang's. `chosen` is what `next` returns first.
    """

    def __init__(
        self,
        decisions: Decisions,
        kv_type: Any,
        state_type: Any,
        watches: bool = True,
        pools: tuple[PoolKind, ...] = (PoolKind.STATES, PoolKind.KV),
    ) -> None:
        self._watches = watches
        self._decisions = decisions
        self._kv, self._state = kv_type, state_type
        self._dirty: dict[int, Any] = {}
        self._pending: dict[PoolKind, dict[int, Any]] = {pool: {} for pool in pools}
        self._known: dict[PoolKind, set[int]] = {pool: set() for pool in pools}
        self.chosen: list[Any] = []
        self._root: Any = None
        self._nobody = Mark(Kind.SUPERSEDED, 0.0)
        self._nobody.reuse_class = decisions.history.class_of(self._nobody)

    def touch(self, node: Any) -> None:
        """`node` changed: children, value, lock or mark."""
        if node is not None and self._watches:
            self._dirty[node.id] = node

    def forget(self) -> None:
        """The cache is emptied: no node of it may stay in memory until the next victim is asked for."""
        self._dirty.clear()
        self.chosen.clear()
        for pending in self._pending.values():
            pending.clear()

    def touch_below(self, node: Any) -> None:
        """The state of `node` came or went: what resumes from it has another price."""
        if not node.children or not self._watches:
            return
        stack, budget = list(node.children.values()), _REPRICED
        while stack and budget:
            child = stack.pop()
            budget -= 1
            self._dirty[child.id] = child
            if child.component_data[self._state].value is None:
                stack.extend(child.children.values())

    def sync(self, core: Any, asked: PoolKind | None = None) -> None:
        """Price every node that changed in the pool that is `asked` for a victim, or in all of them.

        The others wait until they are asked, for a node changes several times in a request; past `_BACKLOG`, a few.
        """
        if core.root_node is not self._root:  # the cache was flushed: none of the old nodes is left
            self._root = core.root_node
            for pool, known in self._known.items():
                for node_id in known:
                    self._decisions.discard(pool, node_id)
                known.clear()
        for pool, pending in self._pending.items():
            pending.update(self._dirty)
            if pool is asked or asked is None:
                self._renew(core, pool, pending)
                pending.clear()
            elif len(pending) > _BACKLOG:
                self._renew(core, pool, {node_id: pending.pop(node_id) for node_id in list(islice(pending, _FEW))})
        self._dirty.clear()

    def _renew(self, core: Any, pool: PoolKind, nodes: dict[int, Any]) -> None:
        """Put `nodes` into the index of `pool` at their present price, or take them out."""
        known, decisions, arena = self._known[pool], self._decisions, core._node_arena
        leaves = core.evictable_device_leaves if pool is PoolKind.KV else None  # none of them has left the tree
        for node_id, node in nodes.items():
            if leaves is None:
                goes = node.parent is not None and arena.get(node_id) is node and self.evictable(core, pool, node)
            else:
                goes = node in leaves
            if goes:
                known.add(node_id)
                decisions.put(pool, self.price(core, pool, node))
            elif node_id in known:
                known.remove(node_id)
                decisions.discard(pool, node_id)

    def holds_free_state(self, node: Any) -> bool:
        """Whether the state of `node` can go now."""
        data = node.component_data[self._state]
        return data.value is not None and data.lock_ref == 0

    def next(self, core: Any, pool: PoolKind, now: float, tried: set[int]) -> Any | None:
        """The node to evict next, None if there is none that was not `tried`; unless it goes, `touch` it afterwards."""
        while self.chosen:
            chosen = self.chosen.pop(0)
            if chosen.id not in tried and self.evictable(core, pool, chosen):
                tried.add(chosen.id)
                return chosen
        while True:
            self.sync(core, pool)
            node_id = self._decisions.victim(pool, now)
            if node_id is None:
                return None
            self._known[pool].discard(node_id)
            node = core._node_arena.get(node_id)
            if node is not None and node_id not in tried and self.evictable(core, pool, node):
                tried.add(node_id)
                return node

    def evictable(self, core: Any, pool: PoolKind, node: Any) -> bool:
        """Whether `node` can leave `pool` now."""
        if pool is not PoolKind.STATES and node in core.evictable_device_leaves:
            return True
        return pool is not PoolKind.KV and self.holds_free_state(node)

    def choose(self, core: Any, now: float) -> Any | None:
        """What is worth least per byte, KV or state; `next` returns it to whichever pool is asked first then."""
        self.chosen = []
        node = self.next(core, PoolKind.BYTES, now, set())
        if node is not None:
            self.chosen = [node]
            self.touch(node)  # it may stay after all
        return node

    def weakest(
        self, core: Any, pool: PoolKind, contenders: Mapping[int, Candidate], count: int, now: float
    ) -> list[int]:
        """Of the `count` that are worth least, cached or contending, the ids of contenders; the others are `chosen`."""
        self.sync(core, pool)
        self.chosen, lost = [], []
        for node_id in self._decisions.weakest(pool, contenders, count, now):
            if node_id in contenders:
                lost.append(node_id)
                continue
            self._known[pool].discard(node_id)
            node = core._node_arena.get(node_id)
            if node is not None and self.evictable(core, pool, node):
                self.chosen.append(node)
                self.touch(node)  # it may stay after all
        return lost

    def unlocked(self, core: Any) -> tuple[list[Any], list[Any]]:
        """Slots of KV tokens and of states, node by node, that nobody reads."""
        nodes = [node for node in core._node_arena.values() if node.parent is not None]
        held = [[node.component_data[kind] for node in nodes] for kind in (self._kv, self._state)]
        tokens, states = ([d.value for d in data if d.value is not None and not d.lock_ref] for data in held)
        return tokens, states

    def price(self, core: Any, pool: PoolKind, node: Any) -> Candidate:
        """`node` as something that can leave `pool`."""
        return self._candidate(node)

    def _candidate(self, node: Any) -> Candidate:
        state = self._state
        above = parent = node.parent
        while above.parent is not None and above.component_data[state].value is None:
            above = above.parent
        try:
            end, parent_end, base = node.hybrid_end, parent.hybrid_end, above.hybrid_end
        except AttributeError:
            end, parent_end, base = end_tokens(node), end_tokens(parent), end_tokens(above)
        held = node.component_data[state].value is not None
        frees_kv = not node.children and node.component_data[self._kv].value is not None
        mark = getattr(node, "hybrid_mark", None) or self._nobody
        # `Candidate(...)` takes as long as the rest of this
        return tuple.__new__(Candidate, (
            node.id,
            end if held else base,  # KV behind the last state saves nothing
            base,
            parent_end,
            end - parent_end if frees_kv else 0,
            int(held),
            len(node.children),
            mark.last_s,
            mark.touch,
            mark.hits,
            mark.kind is Kind.SUPERSEDED,
            mark.reuse_class,
        ))  # fmt: skip

    def missing(self, core: Any) -> list[int]:
        """Ids of evictable nodes that no index knows, and of others that one does; [] if every change was noticed."""
        self.sync(core)
        nodes = [n for n in core._node_arena.values() if n.parent is not None]
        free = {n.id for n in nodes if self.holds_free_state(n)}
        leaves = {n.id for n in core.evictable_device_leaves}
        held = [{n.id for n in nodes if n.component_data[kind].lock_ref} for kind in (self._state, self._kv)]
        states, kv = (self._known[pool] - ids for pool, ids in zip((PoolKind.STATES, PoolKind.KV), held, strict=True))
        return sorted((free ^ states) | (leaves ^ kv))


def end_tokens(node: Any) -> int:
    """Depth of `node` in tokens; a node never changes its own."""
    try:
        return node.hybrid_end  # type: ignore[no-any-return]
    except AttributeError:
        pass
    path = [node]
    while path[-1].parent is not None and not hasattr(path[-1].parent, "hybrid_end"):
        path.append(path[-1].parent)
    above = path[-1].parent
    end = 0 if above is None else above.hybrid_end
    for below in reversed(path):
        end += 0 if below.parent is None else len(below.key)
        below.hybrid_end = end
    return int(end)
