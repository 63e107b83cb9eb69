"""What no policy can beat, and what one that knows the future gets: three rows beside every result.

* `unbounded`: endless memory and a state wherever one is ever wanted.
* `clairvoyant`: enforced capacity, states only where a later request will resume, and the victim is the state with the
  fewest marginal tokens per (byte freed x seconds to its next use). A heuristic, so a lower bound on the optimum.
* `bound` (module `bound`): an upper bound for every policy at that capacity.
"""

import numpy as np

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.sim.reuse import Nodes, ReuseIndex

_NEVER_S = 1e18  # a next use that does not come, as a finite number of seconds


def unbounded_hits(index: ReuseIndex) -> Nodes:
    """Tokens each request could skip with endless memory, int64 of shape (requests,)."""
    return index.seen_tokens


class Clairvoyant:
    """A capacity-enforced cache that knows every later request; `hits()` replays the whole trace."""

    def __init__(self, index: ReuseIndex, capacity_bytes: int, model: ModelSpec) -> None:
        self._index = index
        self._capacity = capacity_bytes
        self._model = model
        self._edge = index.depth - index.depth[index.parent]
        n = len(index.depth)
        self._kv = np.zeros(n, dtype=bool)  # the edge's KV is held
        self._state = np.zeros(n, dtype=bool)
        self._kids = np.zeros(n, dtype=np.int64)  # children whose KV is held
        self._value = np.zeros(n)  # marginal tokens per byte freed, of nodes with a state
        self._next = np.full(n, np.inf)  # seconds of the next resumption here
        self._uses: dict[int, list[int]] = {}
        for j in range(len(index.paths) - 1, -1, -1):  # popped from the end: soonest last
            self._uses.setdefault(int(index.targets[j]), []).append(j)
        self.used_bytes = 0

    def hits(self) -> Nodes:
        """Tokens skipped per request, int64 of shape (requests,)."""
        index = self._index
        hits = np.zeros(len(index.paths), dtype=np.int64)
        for j, path in enumerate(index.paths):
            usable = path[: int(np.searchsorted(index.depth[path], index.trace.requests[j].n_input))]
            held = usable[self._state[usable]]
            hits[j] = index.depth[held[-1]] if len(held) else 0
            self._commit(j, path, int(hits[j]))
        return hits

    def check(self) -> None:
        """Raise InvariantError unless the byte count, the paths and the capacity agree."""
        tokens, states = int(self._edge[self._kv].sum()), int(self._state.sum())
        held = tokens * self._model.kv_bytes_per_token + states * self._model.checkpoint_bytes
        if held != self.used_bytes or held > self._capacity:
            raise InvariantError(f"{held} bytes are held, {self._capacity} allowed, counted: {self.used_bytes}")
        needed = self._state | (self._kids > 0)
        needed[0] = False
        if (needed & ~self._kv).any() or (self._kv & ~needed).any():
            raise InvariantError(f"KV is held for nobody, or missing: {int(np.flatnonzero(needed != self._kv)[0])}")

    def _commit(self, j: int, path: Nodes, hit: int) -> None:
        """Hold what later requests resume from; positions before the hit were not computed and cannot be saved."""
        now = self._index.trace.requests[j].ts
        target = int(self._index.targets[j])
        if target:
            self._uses[target].pop()
            self._schedule(target)
        wanted = [int(v) for v in path if self._uses.get(int(v))]
        fresh = [v for v in wanted if not self._state[v] and self._index.depth[v] > hit]
        if fresh:
            for v in path.tolist():
                if not self._kv[v]:
                    self._kv[v] = True
                    self._kids[self._index.parent[v]] += 1
                    self.used_bytes += int(self._edge[v]) * self._model.kv_bytes_per_token
                if v == fresh[-1]:
                    break
            for v in fresh:
                self._state[v] = True
                self._schedule(v)
                self.used_bytes += self._model.checkpoint_bytes
        for v in path[self._state[path]].tolist():
            self._appraise(v)
        if self.used_bytes > self._capacity:
            self._trim(now)

    def _schedule(self, v: int) -> None:
        later = self._uses.get(v)
        self._next[v] = self._index.trace.requests[later[-1]].ts if later else np.inf

    def _appraise(self, v: int) -> None:
        """Refresh the tokens that only `v` serves, per byte that would go with it."""
        index = self._index
        freed, u = self._model.checkpoint_bytes, v
        if not self._kids[v]:
            while u:
                freed += int(self._edge[u]) * self._model.kv_bytes_per_token
                u = int(index.parent[u])
                if self._state[u] or self._kids[u] > 1:
                    break
        above = int(index.parent[v])
        while above and not self._state[above]:
            above = int(index.parent[above])
        # With states that cost nothing (pure attention) an inner node frees nothing and is never the victim.
        self._value[v] = (index.depth[v] - index.depth[above]) / freed if freed else np.inf

    def _trim(self, now: float) -> None:
        held = np.flatnonzero(self._state)
        score = self._value[held] / np.clip(self._next[held] - now, 1e-9, _NEVER_S)
        position = {int(v): i for i, v in enumerate(held)}
        while self.used_bytes > self._capacity:
            worst = int(score.argmin())
            touched = self._drop(int(held[worst]))
            score[worst] = np.inf
            if touched and self._state[touched]:
                self._appraise(touched)
                score[position[touched]] = self._value[touched] / min(max(self._next[touched] - now, 1e-9), _NEVER_S)

    def _drop(self, v: int) -> int:
        """Drop the state at `v` and the KV that served it alone; return where the freeing stopped."""
        self._state[v] = False
        self.used_bytes -= self._model.checkpoint_bytes
        u = v
        while u and not self._state[u] and not self._kids[u]:
            self._kv[u] = False
            self.used_bytes -= int(self._edge[u]) * self._model.kv_bytes_per_token
            u = int(self._index.parent[u])
            self._kids[u] -= 1
        return u
