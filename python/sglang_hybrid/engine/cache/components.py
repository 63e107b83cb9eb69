"""SGLang's cache components with our decisions: subclasses, so that HiCache, sessions and paging stay SGLang's.

SGLang's signatures gained trailing arguments from 0.5.17 to 0.5.23: everything but what is needed here passes through.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, zero_match_result
from sglang.srt.mem_cache.unified_cache.components import ComponentType, FullComponent, MambaComponent

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache.coordinator import CacheCoordinator
from sglang_hybrid.engine.cache.requests import Checkpoint, Insertion, answered, tracked
from sglang_hybrid.engine.compat import state_of
from sglang_hybrid.engine.speculation import guards
from sglang_hybrid.prefix.admission import keeps_end
from sglang_hybrid.prefix.pools import AHEAD, PoolKind

_UNCOUNTED = {"chunked": True} if "chunked" in {f.name for f in dataclasses.fields(InsertParams)} else {}
"""The second insertion of a pass must not count as a second use of the path; 0.5.23 does not count insertions."""


class _Ordered:
    """Eviction by our index: mixed into a component, whose own order is the fallback."""

    _pool: PoolKind

    def __init__(self, coordinator: CacheCoordinator, cache: Any, params: Any) -> None:
        self.coordinator = coordinator
        self._touch = coordinator.victims.touch  # its price may be another one
        self._ours = False  # whether the walk under way follows our order
        super().__init__(cache, params)

    def _begin(self, core: Any, request_cnt: int) -> bool:
        """A walk of SGLang begins; whether it follows our order."""
        self._ours = self._scored(core)
        self._asked = request_cnt  # by SGLang
        self._wanted = request_cnt  # with what is evicted ahead: no victim is named beyond
        self._enough = request_cnt  # what ends the shortage
        if self._ours:
            self._now, kv = self.coordinator.now(), self._pool is PoolKind.KV
            if kv and self.coordinator.short_tokens:  # the walk may go on to the last leaf, but is not meant to
                self._enough = min(request_cnt, self.coordinator.short_tokens)
            if self.batches:
                pool = self.cache.token_to_kv_pool_allocator if kv else self.coordinator.memory.states
                ahead = pool.size // AHEAD
                self._wanted, self._enough = self._wanted + ahead, self._enough + ahead
            if request_cnt > 0:
                self.coordinator.memory.leaving(self._pool, self._enough)
        self._tried: set[int] = set()
        return self._ours

    def _scored(self, core: Any) -> bool:
        """Whether scores are the order. Session radix caches keep one of their own, which they must not cut across."""
        return self.coordinator.scores and not getattr(core, "enable_session_radix_cache", False)

    @property
    def batches(self) -> bool:
        """Whether all victims of a shortage may leave in one step.

        They may if the order is ours and the shortage ends by what left this pool: not where pools share memory, nor
        where SGLang copies a victim to a host tier first.
        """
        core = self.tree_core
        if core.enable_hicache or self.coordinator.memory.shared or not self._scored(core):
            return False
        donor = getattr(self.cache.token_to_kv_pool_allocator, "mamba_full_cache_donor", None)
        return donor is None or donor() is None

    def satisfied(self, done: dict[Any, int]) -> bool:
        """Whether a walk in our order has ended a shortage, by what `done` counts as evicted; SGLang asks for further
        victims, one at a time, if it has not."""
        return self._ours and done.get(self.component_type, 0) >= self._enough

    def _victim(self, core: Any) -> Any | None:
        return self.coordinator.victims.next(core, self._pool, self._now, self._tried)

    def _evict_device_end(self) -> None:
        for node_id in self._tried:  # one that did not go is still a candidate
            self._touch(self.tree_core._node_arena.get(node_id))
        self._tried = set()
        super()._evict_device_end()

    def commit_hicache_transfer(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        self._touch(node)
        return super().commit_hicache_transfer(node, *args, **kwargs)


class HybridFull(_Ordered, FullComponent):
    """KV: what leaves next is the leaf that is worth least per byte.

    Every unlocking, split and insertion goes through KV, so it speaks for the state of a node as well. What is locked
    stays in the index: it is passed over if its turn comes.
    """

    _pool = PoolKind.KV

    def _evict_device_start(self, request_cnt: int) -> None:
        if self._begin(self.tree_core, request_cnt):
            self._evict_device_request_cnt = request_cnt
            self._evict_device_last_node, self._evict_device_heap = None, []
        else:
            super()._evict_device_start(request_cnt)

    def _evict_device_next_node(self, tracker: Any, *args: Any, **kwargs: Any) -> Any:
        if self._ours:
            if tracker[self.component_type] >= self._wanted:
                return None
            node = self._victim(self.tree_core)
            if node is not None:
                return node.id
            self._ours = False  # nothing has a price: let SGLang's order have a last look
            super()._evict_device_start(self._asked)
        return super()._evict_device_next_node(tracker, *args, **kwargs)

    def release_component_lock(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        self._touch(node)
        return super().release_component_lock(node, *args, **kwargs)

    def redistribute_on_node_split(self, new_parent: Any, child: Any) -> Any:
        self._touch(child)  # `new_parent` has a child and no state: nothing to evict
        return super().redistribute_on_node_split(new_parent, child)

    def evict_component(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        self._touch(node)
        self._touch_parent(node)
        return super().evict_component(node, *args, **kwargs)

    def commit_insert_component_data(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        self._touch(node)
        self._touch_parent(node)
        return super().commit_insert_component_data(node, *args, **kwargs)

    def _touch_parent(self, node: Any) -> None:
        """`node` comes or goes: its parent has another price where it is or was a leaf, or has or had an only child."""
        if len(node.parent.children) <= 2:
            self._touch(node.parent)


class HybridMamba(_Ordered, MambaComponent):
    """States: several per prefill, evicted by score; where they run out, a checkpoint or a match is given up."""

    _pool = PoolKind.STATES

    def finalize_match_result_in_tree_core(self, result: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().finalize_match_result_in_tree_core(result, params, *args, **kwargs)
        node_id = getattr(result.best_match_node, "id", result.best_match_node)
        if self._notes(params, node_id, result.full_kv_hit_length) and result.mamba_branching_seqlen is not None:
            return result._replace(mamba_branching_seqlen=None)
        return result

    def _notes(self, params: Any, node_id: Any, known: int) -> bool:
        """Whether the branch is ours: SGLang would save it in place of the tail, where a pass can save several."""
        if not params.cow_mamba or params.req is None:
            return False
        record = tracked(params.req)
        record.known_tokens, record.matched = known, node_id
        return bool(self.coordinator.step)

    def finalize_match_result_in_cache(self, params: Any, result: Any) -> Any:
        if params.cow_mamba and envs.SGLANG_RADIX_FORCE_MISS.get():
            # SGLang drops the match afterwards, and would begin from the copied state all the same.
            result = zero_match_result(self.cache, result, extra_key=params.key.extra_key)
        elif params.cow_mamba and not self._can_copy(params.req, result):
            self.coordinator.account.event("match_given_up")
            result = zero_match_result(self.cache, result, extra_key=params.key.extra_key)
        return super().finalize_match_result_in_cache(params, result)

    def _can_copy(self, req: Any, result: Any) -> bool:
        """Whether there is a slot for the request's own copy of the matched state."""
        if self.coordinator.memory.has_state() or state_of(req).mamba_pool_idx is not None:
            return True
        if self.tree_core.get_component_device_value(result.best_match_node, self.component_type) is None:
            return True
        locked = self.cache.inc_lock_ref(result.best_match_node)
        try:
            return self.coordinator.memory.ensure_states(1)
        finally:
            self.cache.dec_lock_ref(result.best_match_node, locked.to_dec_params())

    def prepare_for_caching_req(
        self, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool
    ) -> int | None:
        insert_params.hybrid = plan = Insertion(tracked(req))
        if is_finished:
            return self._prepare_end(req, insert_params, plan, token_ids_len)
        return self._prepare_pass(req, insert_params, plan, token_ids_len)

    def _prepare_end(self, req: Any, insert_params: Any, plan: Insertion, token_ids_len: int) -> int:
        """`req` is over: the length up to which it is inserted, with its last state."""
        record, coordinator = plan.record, self.coordinator
        length = super().prepare_for_caching_req(req, insert_params, token_ids_len, True)
        length = guards.fileable(req, length or 0, token_ids_len, bool(self.cache.enable_mamba_extra_buffer))
        if record.pending:
            length = 0  # it ends where its states are not: before an interior that its next pass would jump over
        tokens = answered(req, token_ids_len)
        coordinator.finish(req, record, tokens, max(length, coordinator.cached_tokens(record)))
        plan.mark = None if record.request is None else record.request.tip
        return length

    def _prepare_pass(self, req: Any, insert_params: Any, plan: Insertion, token_ids_len: int) -> int | None:
        """A pass over the prompt is over: its end is inserted with a state, or else the deepest checkpoint is."""
        record, coordinator = plan.record, self.coordinator
        plan.taken = taken = coordinator.slots.take(record, token_ids_len)
        coordinator.account.event("written", len(taken))
        chunked = token_ids_len < len(req.origin_input_ids)
        plan.whole = not chunked
        if not chunked:
            coordinator.decisions.computed(req.rid)
        behind = token_ids_len - max([0, *(checkpoint.position for checkpoint in taken)])
        buffered, spare = bool(self.cache.enable_mamba_extra_buffer), chunked and coordinator.memory.spare_states()
        worth = keeps_end(behind, not chunked, bool(taken), buffered, coordinator.grid, spare)
        takes_end = not record.pending and (not coordinator.admits or worth)
        if takes_end and coordinator.memory.ensure_states(1):
            length = super().prepare_for_caching_req(req, insert_params, token_ids_len, False)
            if length:
                plan.spare = chunked and coordinator.admits
                if not chunked and record.request is not None:
                    plan.mark = record.request.tip
                return length
        if not taken:
            return 0
        deepest = taken.pop(0)
        insert_params.mamba_value = deepest.slot
        plan.mark = coordinator.decisions.planned_mark(record.request, deepest.wanted, coordinator.now(), False)
        return deepest.position

    def commit_insert_component_data(
        self, node: Any, is_new_leaf: bool, params: Any, result: Any, *args: Any, **kwargs: Any
    ) -> None:
        super().commit_insert_component_data(node, is_new_leaf, params, result, *args, **kwargs)
        coordinator = self.coordinator
        plan = getattr(params, "hybrid", None)  # None for an insertion that is no request's
        record = None if plan is None else plan.record
        if result.mamba_exist:
            coordinator.found(node, record)
            return
        mark = None if plan is None else plan.mark
        if mark is None:
            request = None if record is None else record.request
            spare = plan is not None and plan.spare
            mark = coordinator.decisions.mark(request, len(params.key), coordinator.now(), spare=spare)
        coordinator.saved(node, mark, record)

    def cleanup_after_caching_req(
        self, req: Any, is_finished: bool, insert_result: Any = None, insert_params: Any = None
    ) -> None:
        super().cleanup_after_caching_req(req, is_finished, insert_result=insert_result, insert_params=insert_params)
        record = tracked(req)
        plan = getattr(insert_params, "hybrid", None) or Insertion(record)
        taken, plan.taken = plan.taken, []
        if is_finished:
            last = self.coordinator.slots.take(record, 1 << 62)
            self.coordinator.account.event("written", len(last))
            taken += last
        inserted = 0
        if insert_result is not None and insert_params is not None and insert_params.key is not None:
            inserted = len(insert_params.key)
        if record.request is not None and plan.whole:
            record.request.tip.unkept = len(req.origin_input_ids) - inserted  # the rest is the request's own
        for checkpoint in taken:
            if 0 < checkpoint.position < inserted:
                self._insert(record, checkpoint, insert_params)
            else:
                self.coordinator.slots.free(checkpoint)
        if is_finished:
            self.coordinator.ended(req, record)

    def _insert(self, record: Any, checkpoint: Checkpoint, main: Any) -> None:
        """Attach a second state of the same pass to the path that was just inserted."""
        at, request, coordinator = checkpoint.position, record.request, self.coordinator
        later = request is not None and main.hybrid.mark is request.tip
        mark = coordinator.decisions.planned_mark(request, checkpoint.wanted, coordinator.now(), later)
        params = dataclasses.replace(
            main,
            key=main.key[:at],
            value=main.value[:at],
            mamba_value=checkpoint.slot,
            prev_prefix_len=at,
            **_UNCOUNTED,
        )
        params.hybrid = Insertion(record, mark)
        if self.cache.insert(params).mamba_exist:
            coordinator.slots.free(checkpoint)

    def _alloc_mamba_slot(self, *args: Any, **kwargs: Any) -> Any:
        self.coordinator.memory.ensure_states(1)
        return super()._alloc_mamba_slot(*args, **kwargs)

    def _evict_device_start(self, request_cnt: int) -> None:
        if self._begin(self.tree_core, request_cnt):
            self._evict_device_cursor, self._evict_device_request_cnt = None, request_cnt
        else:
            super()._evict_device_start(request_cnt)

    def _evict_device_next_node(self, tracker: Any, *args: Any, **kwargs: Any) -> Any:
        while self._ours:
            done = tracker[self.component_type]
            if done >= self._wanted:
                return None
            node = self._victim(self.tree_core)
            if node is None:
                self._ours = False
                super()._evict_device_start(self._asked)
                break
            if node in self.tree_core.evictable_device_leaves:
                return node.id  # goes as a whole
            # SGLang's step, at our cursor
            self._evict_device_cursor, self._evict_device_request_cnt = node, done + 1
            named = super()._evict_device_next_node(tracker, *args, **kwargs)
            if named is not None or compat.walks_on() or tracker[self.component_type] <= done:
                return named
        return super()._evict_device_next_node(tracker, *args, **kwargs)

    def evict_component(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        data = node.component_data[self.component_type]
        held = data.value is not None
        result = super().evict_component(node, *args, **kwargs)
        self._touch(node)
        if held and data.value is None:
            self._lost(node)
        return result

    def _lost(self, node: Any) -> None:
        """The state of `node` leaves the device."""
        self.coordinator.left(node)
        if node.component_data[self.component_type].host_value is None:
            self.coordinator.lost(node)


TYPES = {"kv": ComponentType.FULL, "state": ComponentType.MAMBA, "window": ComponentType.SWA}
