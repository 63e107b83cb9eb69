"""A simulated server that tells what it holds, with the events of a real one (docs/events.md)."""

from collections.abc import Callable, Sequence
from typing import Any

from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix import policies
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.routing.index import STATE_KIND
from sglang_hybrid.sim.running import Running
from sglang_hybrid.sim.server import SimulatedServer
from sglang_hybrid.sim.shape import Shape

Event = dict[str, Any]


class TellingServer(SimulatedServer):
    """`tell` gets every event of a page or a state that comes or goes; pages are as long as the grid.

    Before a request arrives and before it ends, `names` gets the names of the whole pages of its prompt and answer
    under its id, as `routing.index.block_hashes` makes them.
    """

    def __init__(
        self,
        model: ModelSpec,
        shape: Shape,
        tell: Callable[[Event], None],
        policy: str | policies.Policy = policies.DEFAULT,
    ) -> None:
        if model.checkpoint_bytes == 0:
            raise ConfigError(f"only models with states tell of them; choose a hybrid one: {model.name}")
        super().__init__(model, shape, policy)
        self.names: dict[str, Sequence[int]] = {}
        self.page_tokens = shape.grid
        self._tell = tell
        self._pages: set[int] = set()
        self._path: dict[int, Sequence[int]] = {}  # node -> names of at least the pages down to its end

    def _insert(self, run: Running, at: int, mark: Mark, now: float) -> None:
        super()._insert(run, at, mark, now)
        names, count = self.names[run.id], at // self.page_tokens
        first = count
        while first and names[first - 1] not in self._pages:  # whoever holds a page holds those before it
            first -= 1
        node = self.tree.match(run.key[:at]).node
        if node.end != at or at % self.page_tokens:
            raise InvariantError(f"states lie on the grid of {self.page_tokens}: {at}, {node.end}")
        self._path[node.id] = names
        if first < count:
            new = list(names[first:count])
            self._pages.update(new)
            self._tell(_stored(new))
        self._tell(_stored([names[count - 1]], STATE_KIND))

    def evict(self, node: Node) -> None:
        parent, start, state = node.parent, node.start, node.state is not None
        names = self._path[node.id]
        super().evict(node)
        if state:
            self._tell(_removed([names[node.end // self.page_tokens - 1]], STATE_KIND))
        if node.parent is not None or parent is None:  # its KV stays
            return
        del self._path[node.id]
        if parent.parent is not None:
            self._path.setdefault(parent.id, names)
        gone = list(names[start // self.page_tokens : node.end // self.page_tokens])
        if gone:
            self._pages.difference_update(gone)
            self._tell(_removed(gone))


def _stored(names: list[int], kind: str | None = None) -> Event:
    return {"type": "BlockStored", "block_hashes": names, "medium": "GPU", "kv_cache_spec_kind": kind}


def _removed(names: list[int], kind: str | None = None) -> Event:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "kv_cache_spec_kind": kind}
