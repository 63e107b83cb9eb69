"""A cache of one byte budget as the papers simulate it.

A request looks up when it comes and commits at once, answer included; nothing runs, so nothing but the cache takes
memory. States are saved where a server can (`saving`), or anywhere as in the papers. `sim.server` has slots and chunks.
"""

from typing import NamedTuple

from sglang_hybrid.core.errors import ConfigError, InvariantError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix import policies
from sglang_hybrid.prefix.admission import ANYWHERE, Places
from sglang_hybrid.prefix.decisions import Decisions
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.request import Request
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.prefix.tree.radix_tree import Match
from sglang_hybrid.prefix.tree.tokens import Tokens, as_tokens
from sglang_hybrid.sim.clock import Elapsed
from sglang_hybrid.sim.saving import Saving
from sglang_hybrid.sim.snapshot import Snapshot, load
from sglang_hybrid.sim.tree_cache import TreeCache


class Commit(NamedTuple):
    """What one commit did: positions of saved states, evictions, KV tokens held afterwards."""

    positions: tuple[int, ...]
    evicted: int
    kv_tokens: int


class PrefixCache(TreeCache):
    """KV and states of `capacity_bytes` together, never exceeded between calls.

    What a request made is inserted first and may itself be what is worth least. Of a sequence larger than the cache
    only what fits is saved. Time that runs backwards is taken as the latest time seen (`clock`).
    `saving`: where a server saves states, at the end of a prompt too: the same prompt may come again. The papers (None)
    save any position, and no end of a prompt for its own sake: the answer's end is near.
    """

    def __init__(
        self,
        model: ModelSpec,
        capacity_bytes: int,
        policy: str | policies.Policy = policies.DEFAULT,
        saving: Saving | None = None,
    ) -> None:
        if capacity_bytes < 0:
            raise ConfigError(f"a cache needs a capacity of zero bytes or more: {capacity_bytes}")
        where = ANYWHERE if saving is None else Places(saving.grid, saving.step, saving.page)
        super().__init__(Decisions(model, policy, where=where), (PoolKind.BYTES,))
        self.capacity_bytes = capacity_bytes
        self.saving = saving
        self._elapsed = Elapsed()

    def lookup(self, tokens: Tokens, now: float) -> int:
        """Tokens a prefill of `tokens` can skip: at most all but the last, which must be computed for its logits."""
        return self._match(as_tokens(tokens), now).resume_tokens

    def _match(self, tokens: Tokens, now: float) -> Match:
        self._elapsed.look(now)
        return self.tree.match(tokens, max(0, tokens.size - 1))

    def commit(
        self, tokens: Tokens, n_input: int, now: float, boundaries: tuple[int, ...] = (), hints: Hints = NO_HINTS
    ) -> Commit:
        """Offer the finished request `tokens` (input, then output) for caching.

        `boundaries` are input positions the caller knows will be shared (end of a system prompt, of a message).
        Raises ConfigError for lengths or boundaries outside the sequence.
        """
        tokens = as_tokens(tokens)
        total = tokens.size
        if not 0 <= n_input <= total:
            raise ConfigError(f"n_input counts the first tokens of {total}: {n_input}")
        now = self._elapsed.request(now)
        prompt, decisions = tokens[:n_input], self.decisions
        found = self.tree.match(prompt, max(0, n_input - 1))
        request = decisions.arrive(
            "",
            prompt,
            now,
            found.resume_tokens,
            max(found.resume_tokens, found.kv_tokens),
            None,
            boundaries,
            hints=hints,
        )
        self.resume(request, found.resume_node)
        places = self._fitting(self._places(request, self._positions(request, total), total), found.resume_tokens)
        decisions.finish(request, tokens, now, max(places, default=found.resume_tokens))
        if places:
            self.save(request, tokens, places, now)
        decisions.fit(held_bytes=self.capacity_bytes)
        return Commit(tuple(places), self._trim(now), self.tree.kv_tokens)

    def _positions(self, request: Request, total: int) -> list[int]:
        """What is worth a state."""
        if total == 0:
            return []
        if self.tree.kv_only:
            return [total]
        tail = request.prompt_tokens - 1
        kept = self.saving is not None or tail in request.marks or tail == request.kv_tokens
        wanted = {at for at in request.positions if kept or at != tail}
        wanted.update(self.decisions.answer_positions(request, total))
        return sorted(wanted)

    def _places(self, request: Request, positions: list[int], total: int) -> dict[int, int]:
        """Where the states of `positions` are saved, and the position that each stands for."""
        saving, start, prompt = self.saving, request.cached_tokens, request.prompt_tokens
        if saving is None or self.tree.kv_only or not positions:
            return {at: at for at in positions}
        if self.decisions.policy.stock:
            return saving.stock(start, prompt, total, request.kv_tokens)
        return saving.places(positions, start, prompt, total)

    def mark(self, request: Request, wanted: int, later: bool, now: float) -> Mark:
        if self.saving is not None and wanted == request.prompt_tokens - 1:
            mark = self.decisions.planned_mark(request, wanted, now, later)
            self.decisions.touch(mark)
            return mark
        return super().mark(request, wanted, later, now)

    def _fitting(self, places: dict[int, int], resumed: int) -> dict[int, int]:
        """`places`, ascending, up to the deepest whose whole path could be held."""
        kv, state, found = self.model.kv_bytes_per_token, self.model.checkpoint_bytes, sorted(places)
        if self.tree.kv_only and found:
            end = min(found[-1], self.capacity_bytes // kv) if kv else found[-1]
            return {end: end} if end else {}
        for count in range(len(found), 0, -1):
            if found[count - 1] * kv + (count + (resumed > 0)) * state <= self.capacity_bytes:
                return {at: places[at] for at in found[:count]}
        return {}

    def seed(self, tokens: Tokens, now: float) -> None:
        """Announce a hot prefix: a state is saved at its end by the first request that computes it."""
        self.decisions.seed(as_tokens(tokens), self._elapsed.look(now))

    def load(self, snapshot: Snapshot) -> None:
        """Fill this empty cache with a saved tree; raises ConfigError if it is not empty or too small."""
        if self.tree.nodes:
            raise ConfigError(f"load a snapshot into an empty cache, this holds nodes: {self.tree.nodes}")
        load(self.tree, snapshot)
        self._reindex()
        if self.used_bytes() > self.capacity_bytes:
            raise ConfigError(f"the snapshot needs more than {self.capacity_bytes} bytes: {self.used_bytes()}")

    def _trim(self, now: float) -> int:
        """Evict down to the capacity; returns how often."""
        evicted = 0
        while (over := self.used_bytes() - self.capacity_bytes) > 0:
            node = self.victim(PoolKind.BYTES, now)
            if node is None:
                raise InvariantError(f"nothing can be evicted, with more than {self.capacity_bytes} bytes: {over}")
            if self.tree.kv_only:
                self.tree.trim(node, -(-over // self.model.kv_bytes_per_token))
            else:
                self.evict(node)
            evicted += 1
        return evicted

    def check(self) -> None:
        super().check()
        if self.used_bytes() > self.capacity_bytes:
            raise InvariantError(f"a cache of {self.capacity_bytes} bytes holds more: {self.used_bytes()}")
