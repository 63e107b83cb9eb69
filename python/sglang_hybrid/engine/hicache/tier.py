"""A host tier behind the pools (HiCache): what leaves either tier is what is worth least there.

SGLang copies nodes to host memory as they are inserted, demotes what leaves the device, and loads it back for a request
that matches it. All of that stays SGLang's; here are the order in which either tier gives things up, the states that
SGLang's own copies miss, and the memory a request needs before it is promised what lies in the host tier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_hybrid.engine.cache.victims import Victims, end_tokens
from sglang_hybrid.engine.compat import state_of
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.pools import PoolKind

HOST = {PoolKind.STATES: PoolKind.HOST_STATES, PoolKind.KV: PoolKind.HOST_KV}
"""The pool in host memory behind each pool of the device."""


class TieredVictims(Victims):
    """The evictable nodes of both tiers. A state in either of them is one that can be resumed from."""

    def evictable(self, core: Any, pool: PoolKind, node: Any) -> bool:
        """Whether `node` can leave `pool` now. In host memory, only what is not on the device as well does."""
        if pool not in HOST.values():
            return super().evictable(core, pool, node)
        if pool is PoolKind.HOST_KV:
            return node in core.evictable_host_leaves
        data = node.component_data[self._state]
        return data.host_value is not None and not data.host_lock_ref and core.host_lru_lists[self._state].in_list(node)

    def _has_state(self, node: Any) -> bool:
        data = node.component_data[self._state]
        return data.value is not None or data.host_value is not None

    def _on_device(self, node: Any) -> bool:
        return node.component_data[self._kv].value is not None

    def _candidate(self, node: Any) -> Candidate:
        above = node.parent
        while above.parent is not None and not self._has_state(above):
            above = above.parent
        base, held = end_tokens(above), self._has_state(node)
        leaf = self._on_device(node) and not any(self._on_device(child) for child in node.children.values())
        return (
            super()
            ._candidate(node)
            ._replace(
                end_tokens=end_tokens(node) if held else base,
                base_tokens=base,
                freed_kv_tokens=len(node.key) if leaf else 0,
                states=int(held),
            )
        )

    def price(self, core: Any, pool: PoolKind, node: Any) -> Candidate:
        candidate = self._candidate(node)
        if pool not in HOST.values():
            return candidate
        return candidate._replace(freed_kv_tokens=len(node.key) if node in core.evictable_host_leaves else 0)

    def missing(self, core: Any) -> list[int]:
        """Ids of evictable nodes that no index knows; [] unless a change went unnoticed."""
        wrong = set(super().missing(core))
        nodes = [node for node in core._node_arena.values() if node.parent is not None]
        for pool in HOST.values():
            wrong |= {node.id for node in nodes if self.evictable(core, pool, node)} ^ self._known[pool]
        return sorted(wrong)


class HostTier:
    """What is done about the host tier of one cache. `event` tells its account."""

    def __init__(self, cache: Any, state_type: Any, event: Callable[[str], None]) -> None:
        self._cache = cache
        self._event = event
        self._state = state_type
        self._uncopied: dict[int, Any] = {}

    def saved(self, node: Any) -> None:
        """A state was attached to `node`: see to its copy.

        SGLang copies the end of an insertion. A second state of the same pass lies on a path that is just being
        copied, and then SGLang leaves it out. Up to 0.5.21 it copies no chunk of a prompt until the next one brings a
        new page: a prompt that has no whole page behind its last full chunk is never copied.
        """
        self._uncopied[node.id] = node

    def copied(self) -> bool:
        """Wait for the copies to host memory that are under way, which keep what they copy; whether there were any."""
        if not self._cache.ongoing_write_through:
            return False
        self._cache.writing_check(write_back=True)
        return True

    def back_up(self) -> None:
        """Start the copies that SGLang left out; what is still being copied waits."""
        from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV

        core = self._cache.tree_core
        at_once = not core.is_write_back and core.write_through_threshold == 1
        for node_id, node in list(self._uncopied.items()):
            data = node.component_data[self._state]
            gone = core._node_arena.get(node_id) is not node or data.value is None or data.host_value is not None
            if not gone and node.write_through_pending_id is not None:
                continue
            del self._uncopied[node_id]
            if not gone and node.backuped:
                self._cache._execute_and_commit_kv_backup(BackupKV([node_id]))
            elif not gone and at_once:  # otherwise the KV takes its state along when it is copied
                self._cache._execute_and_commit_kv_backup(core._build_backup_kv_action(node))

    def evict(
        self, coordinator: Any, component: Any, pool: PoolKind, count: int, tracker: Any, *frees: Any, **told: Any
    ) -> None:
        """Free `count` tokens or states of host memory behind `pool`, what is worth least first.

        `tracker`, `frees` and what is `told` are those of SGLang's `drive_host_eviction`, which does the same by age.
        """
        from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer

        core, kind, tried = self._cache.tree_core, component.component_type, set[int]()
        victims, now, host = coordinator.victims, coordinator.now(), {"target": EvictLayer.HOST}
        while tracker[kind] < count and (node := victims.next(core, HOST[pool], now, tried)) is not None:
            if node in core.evictable_host_leaves:
                core._evict_host_leaf(node, tracker, *frees, **told)
                continue
            core._evict_component_and_detach_lru(node, component, *frees, tracker=tracker, **told, **host)
            core._cascade_evict(node, component, tracker, *frees, **told, **host)
            core._update_evictable_leaf_sets(node)
        for node_id in tried:
            victims.touch(core._node_arena.get(node_id))

    def secure(self, memory: Any, req: Any) -> None:
        """See to it that `req`, about to be admitted, can be given the state that its match found in host memory.

        SGLang asserts where there is no slot for it. If `memory`, the cache's, has none, the match ends where the
        device's does.
        """
        if not getattr(req, "mamba_host_hit_length", 0) or state_of(req).mamba_pool_idx is not None:
            return
        cache = self._cache
        held = cache.inc_lock_ref(req.last_node)
        backed = cache.inc_host_lock_ref(req.best_match_node)
        try:
            room = memory.ensure_states(2)  # the node's own, and the request's
        finally:
            cache.dec_host_lock_ref(req.best_match_node, backed.to_dec_params())
            cache.dec_lock_ref(req.last_node, held.to_dec_params())
        if not room:
            self.give_up(req)

    def give_up(self, req: Any) -> None:
        """There is no memory for what `req` would load back: its match ends where the device's does."""
        self._event("restore_given_up")
        req.host_hit_length = req.mamba_host_hit_length = 0
        self.resume_on_device(req)

    def resume_on_device(self, req: Any) -> None:
        """`req` does not get what lies in host memory: its state is the one at the end of its device match.

        SGLang copies the state of the deepest match only; behind a shorter one it would start from zeros.
        """
        source = self._cache.tree_core.get_component_device_value(req.last_node, self._state)
        state_of(req).mamba_cow_src_index = source
