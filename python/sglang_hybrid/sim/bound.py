"""An upper bound on what any policy can skip at a capacity: Lagrange duality over space and time.

To resume request j at node v, each edge above v must have been held since the last request that passed it, and the
state at v since the last that passed v. These byte-seconds serve j alone. Price a byte-second in window w of the trace
at lambda_w >= 0: then for *any* prices

    sum over j of max over v (depth of v - price of holding what v needs, or 0) + sum over w of lambda_w * C * length_w

is at least the tokens any policy skips at capacity C. It is enough to look at the nodes of the trace's tree: between
two of them the price of holding grows evenly with every token, so the best place is at an end of the edge, or where the
capacity ends: a resumption at depth d holds d tokens of KV and a state at one moment, so d * KV + state <= C, which is
no limit where KV costs nothing and the state fits. With one window this is the fractional space-time knapsack; more
windows see that bytes unused at night cannot be used at noon. Prices are improved by a fixed number of multiplicative
subgradient steps and the least value found is returned, so the result is always valid and deterministic.
"""

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.sim.reuse import Nodes, ReuseIndex

Floats = npt.NDArray[np.float64]
WINDOWS = 96
STEPS = 160


class SpaceTimeBound:
    """The bound for one trace and model at several capacities; the arrays are built once."""

    def __init__(self, index: ReuseIndex, model: ModelSpec) -> None:
        self._model = model
        self._ts = np.array([r.ts for r in index.trace.requests])
        self._edges = _window_edges(self._ts)
        last = np.full(len(index.depth), -1, dtype=np.int64)
        starts, request, previous, depth = [0], [], [], []
        for j, path in enumerate(index.paths):
            known = path[: int(np.searchsorted(index.depth[path], index.seen_tokens[j], side="right"))]
            if len(known):
                starts.append(starts[-1] + len(known))
                request.append(np.full(len(known), j, dtype=np.int64))
                previous.append(last[known])
                depth.append(index.depth[known])
            last[path] = j
        self._starts = np.array(starts[:-1], dtype=np.int64)
        ends = np.array(starts[1:], dtype=np.int64)
        self._counts: Nodes = ends - self._starts
        empty = [np.empty(0, dtype=np.int64)]
        self._request, self._previous, self._depth = (np.concatenate(x or empty) for x in (request, previous, depth))
        shallower = np.concatenate([[0], self._depth[:-1]])[: len(self._depth)]
        if len(self._starts):
            shallower[self._starts] = 0
        self._edge_tokens = self._depth - shallower
        self._edge_bytes = self._edge_tokens * float(model.kv_bytes_per_token)

    def tokens(self, capacity_bytes: int) -> float:
        """No policy skips more input tokens than this at `capacity_bytes`."""
        if not len(self._starts):
            return 0.0
        room = float(capacity_bytes) * np.diff(self._edges)
        # An item that reaches deeper than what fits is cut there, inside its edge.
        cut = np.clip(self._depth - self._deepest(capacity_bytes), 0.0, None)
        cut = np.where(cut < self._edge_tokens, cut, np.inf)
        best = float(np.maximum.reduceat(np.where(np.isfinite(cut), self._depth - cut, 0.0), self._starts).sum())
        if best == 0.0:
            return 0.0
        price = np.full(len(room), best / max(float(room.sum()), 1e-300))
        for step in range(STEPS):
            value, use = self._dual(price, room, cut)
            best = min(best, value)
            rate = 1.5 / (1.0 + 0.06 * step)
            price = price * np.exp(np.clip(rate * (use / np.maximum(room, 1e-300) - 1.0), -1.0, 1.0))
        return best

    def _deepest(self, capacity_bytes: int) -> float:
        """Tokens of the deepest resumption that fits into `capacity_bytes`: below zero if no state does, else endless
        without a cost of KV.
        """
        left, per_token = capacity_bytes - self._model.checkpoint_bytes, self._model.kv_bytes_per_token
        if left < 0:
            return -1.0
        return left / per_token if per_token else np.inf

    def _dual(self, price: Floats, room: Floats, cut: Floats) -> tuple[float, Floats]:
        """Value of the bound at these prices, and the byte-seconds per window that its choice would use."""
        paid = np.interp(self._ts, self._edges, np.concatenate([[0.0], np.cumsum(price * np.diff(self._edges))]))
        rent = paid[self._request] - paid[self._previous]
        running = np.cumsum(self._edge_bytes * rent)
        before = np.concatenate([[0.0], running])[self._starts]
        cost = running - np.repeat(before, self._counts) + self._model.checkpoint_bytes * rent
        reachable = np.isfinite(cut)
        beyond = np.where(reachable, cut, 0.0)
        gain = self._depth - beyond - (cost - beyond * self._model.kv_bytes_per_token * rent)
        gain = np.where(reachable, gain, -1.0)
        best = np.maximum.reduceat(gain, self._starts)
        chosen = self._chosen(gain, best)
        use = self._occupancy(chosen)
        return float(np.maximum(best, 0.0).sum() + (price * room).sum()), use

    def _chosen(self, gain: Floats, best: Floats) -> Nodes:
        """The item per request that attains its best gain, where that is positive."""
        attains = gain == np.repeat(best, self._counts)
        items = np.flatnonzero(attains & (gain > 0.0))
        _, first = np.unique(self._request[items], return_index=True)
        return items[first]

    def _occupancy(self, chosen: Nodes) -> Floats:
        """Byte-seconds per window if each chosen item held its edges and its state since their last visits."""
        group = np.searchsorted(self._starts, chosen, side="right") - 1
        begin = self._starts[group]
        edges = _ranges(begin, chosen + 1)
        held = np.concatenate([self._edge_bytes[edges], np.full(len(chosen), float(self._model.checkpoint_bytes))])
        since = np.concatenate([self._previous[edges], self._previous[chosen]])
        until = np.concatenate([self._request[edges], self._request[chosen]])
        n = len(self._ts)
        level = np.cumsum(np.bincount(since, held, n) - np.bincount(until, held, n))
        area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(self._ts))])
        return np.diff(np.interp(self._edges, self._ts, area))


def _window_edges(ts: Floats) -> Floats:
    """At most WINDOWS + 1 increasing times, dense where requests are dense."""
    edges = np.unique(np.quantile(ts, np.linspace(0.0, 1.0, WINDOWS + 1)))
    return edges if len(edges) > 1 else np.array([ts[0], ts[0] + 1e-9])


def _ranges(begin: Nodes, end: Nodes) -> Nodes:
    """All integers of the half-open ranges begin[i]..end[i], one after the other."""
    lengths = end - begin
    if not len(lengths):
        return np.empty(0, dtype=np.int64)
    offsets = np.repeat(begin - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    return offsets + np.arange(int(lengths.sum()), dtype=np.int64)
