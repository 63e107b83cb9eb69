"""Which pages of a budget belong to whom: the nodes of a tree, the requests that run, or nobody."""

from dataclasses import dataclass, field

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.memory.sizing import KV, STATE
from sglang_hybrid.memory.supply import AtHand, Ids, PageSupply
from sglang_hybrid.prefix.tree.check import expect
from sglang_hybrid.prefix.tree.node import Node

_NONE = np.empty(0, dtype=np.int64)


@dataclass
class Row:
    """What a running request has: `pages` of KV from its first token on, and `slots` for states.

    The first `shared` of its pages are the tree's.
    """

    pages: Ids
    shared: int
    slots: list[int] = field(default_factory=list)


class Ownership:
    """Pages of `kv`, each of `page` tokens, and slots of `states`."""

    def __init__(self, kv: PageSupply, states: PageSupply, page: int) -> None:
        self._kv, self._states, self._page = kv, states, page
        self.rows: dict[str, Row] = {}
        self._pages: dict[int, Ids] = {}  # by node: those of its edge
        self._slot: dict[int, int] = {}  # by node: where its state lies

    def open(self, request_id: str) -> None:
        """A request comes; it has nothing."""
        self.rows[request_id] = Row(_NONE, 0)

    def resume(self, request_id: str, node: Node) -> None:
        """It reads what the tree holds up to `node`."""
        row = self.rows[request_id]
        row.pages, row.shared = self._path(node), node.end // self._page

    def take_kv(self, request_id: str, tokens: int) -> None:
        """It gets pages for `tokens` more, which were held for it. Raises ConfigError if there are none."""
        row = self.rows[request_id]
        row.pages = np.concatenate((row.pages, _taken(self._kv, tokens // self._page)))

    def take_slots(self, request_id: str, count: int) -> None:
        """It gets slots that were held for it. Raises ConfigError if there are none."""
        self.rows[request_id].slots += _taken(self._states, count).tolist()

    def try_slot(self, request_id: str) -> bool:
        """It gets a slot if one can be had; whether it did."""
        slot = self._states.hand_out(1)
        if slot is not None:
            self.rows[request_id].slots += slot.tolist()
        return slot is not None

    def trim_slots(self, request_id: str, most: int) -> None:
        """It gives back slots beyond `most`."""
        slots = self.rows[request_id].slots
        _give(self._states, slots[most:])
        del slots[most:]

    def close(self, request_id: str) -> None:
        """It ended, and gives back what is not the tree's."""
        row = self.rows.pop(request_id)
        _give(self._states, row.slots)
        _give(self._kv, row.pages[row.shared :])

    def split(self, upper: Node) -> None:
        """`upper` was split off the node below it: its pages are the first of those."""
        for lower in upper.children.values():
            pages, own = self._pages.get(lower.id, _NONE), (lower.end - upper.end) // self._page
            if len(pages) > own:
                self._pages[upper.id], self._pages[lower.id] = np.split(pages, [len(pages) - own])

    def insert(self, request_id: str, leaf: Node) -> None:
        """`leaf` is in the tree; if it was not before, its pages are the request's."""
        above = leaf.parent
        assert above is not None
        for node in (above, leaf):
            if node.parent is not None and node.id not in self._pages:
                self.split(node)
        if leaf.id not in self._pages:
            pages = self.rows[request_id].pages
            self._pages[leaf.id] = pages[above.end // self._page : leaf.end // self._page]

    def share(self, request_id: str, leaf: Node) -> None:
        """The request reads the tree's pages up to `leaf`, and gives back what others had computed before."""
        row, path, end = self.rows[request_id], self._path(leaf), leaf.end // self._page
        own = row.pages[row.shared : end]
        _give(self._kv, own[own != path[row.shared :]])
        row.pages, row.shared = np.concatenate((path, row.pages[end:])), end

    def attach(self, request_id: str, node: Node) -> None:
        """The state of `node` lies in a slot of the request."""
        self._slot[node.id] = self.rows[request_id].slots.pop()

    def drop_state(self, node: Node) -> None:
        """The state of `node` leaves the tree."""
        _give(self._states, [self._slot.pop(node.id)])

    def drop_kv(self, node: Node) -> None:
        """`node` leaves the tree."""
        _give(self._kv, self._pages.pop(node.id))

    def ids(self, nodes: list[Node], states: list[Node]) -> dict[str, Ids]:
        """Pages of `nodes`, and slots of the `states` of nodes."""
        pages = [self._pages[node.id] for node in nodes]
        slots = np.array([self._slot[node.id] for node in states], dtype=np.int64)
        return {KV: np.concatenate([_NONE, *pages]), STATE: slots}

    def _path(self, node: Node) -> Ids:
        parts = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            parts.append(self._pages[at.id])
            at = at.parent
        return np.concatenate(parts[::-1]) if parts else _NONE

    def check(self, nodes: list[Node]) -> None:
        """Raise InvariantError unless the `nodes` of the tree and the rows own all that was taken, each page once."""
        expect({node.id for node in nodes} == set(self._pages), "nodes with pages", len(self._pages), len(nodes))
        rows = self.rows.values()
        kv = np.concatenate([_NONE, *self._pages.values(), *[row.pages[row.shared :] for row in rows]]).tolist()
        slots = [*self._slot.values(), *[slot for row in rows for slot in row.slots]]
        for supply, ids in ((self._kv, kv), (self._states, slots)):
            expect(len(set(ids)) == len(ids), "pages with one owner", len(ids), len(set(ids)))
            expect(supply.taken == len(ids), "pages taken", supply.taken, len(ids))


def _taken(supply: PageSupply, pages: int) -> Ids:
    taken = supply.hand_out(pages)
    if taken is None:
        raise ConfigError(f"give the server a larger budget, it lacks pages of {supply.pool.name}: {pages}")
    return taken


def _give(supply: PageSupply, pages: Ids | list[int]) -> None:
    if len(pages):
        supply.take_back(AtHand(np.asarray(pages, dtype=np.int64)), len(pages))
