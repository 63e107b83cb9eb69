"""What happens to requests in one cache, as questions to `Decisions`: arrival, checkpoints, states saved, the end."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cache import requests
from sglang_hybrid.engine.cache.boundaries import first_message, last_message, lost_breakpoints, named
from sglang_hybrid.engine.cache.hints import named_hints
from sglang_hybrid.engine.cache.memory import Memory, Parts
from sglang_hybrid.engine.cache.passes.prefill_states import PrefillStates
from sglang_hybrid.engine.cache.requests import Tracked, tracked
from sglang_hybrid.engine.cache.victims import end_tokens
from sglang_hybrid.engine.compat import state_of
from sglang_hybrid.engine.segments.composer import Composer
from sglang_hybrid.engine.segments.marked import marks as marks_segments
from sglang_hybrid.prefix.admission import own_place, places
from sglang_hybrid.prefix.misses import attribute
from sglang_hybrid.prefix.request import Request
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.segment.passes import Pass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What this server can do, and what of it is decided here.

    `grid`: tokens between positions that can be resumed from (1 without the extra buffer). `prefill`: the states that
    a forward pass gives back. `admits` and `scores` say whether admission and eviction are ours; with neither, SGLang's
    decisions pass through and are only accounted.
    `message_end_ids`: tokens that end a message of a conversation.
    """

    grid: int
    prefill: PrefillStates
    admits: bool = True
    scores: bool = True
    message_end_ids: frozenset[int] = frozenset()


class CacheCoordinator:
    """Shared by the two components of one cache: `memory` says what can be had, `parts` are what both work on."""

    def __init__(self, parts: Parts, memory: Memory, rules: Rules, composer: Composer | None = None) -> None:
        self.cache = parts.cache
        self.decisions = parts.decisions
        self.victims = parts.victims
        self.slots = parts.slots
        self.account = parts.account
        self.tier = parts.tier
        self.events = parts.events
        self.composer = composer
        self.now = parts.now
        self.memory = memory
        self.grid = rules.grid
        self.prefill = rules.prefill
        self.step = rules.prefill.step if rules.admits else 0
        self.admits = rules.admits
        self.scores = rules.scores
        self._message_ends = sorted(rules.message_end_ids)
        self._root: Any = None
        self.starved = False
        """Whether the request that is to run next waits for memory, and nobody runs."""
        self.short_tokens = 0
        """Of KV, that an allocation is short of; 0 where SGLang says so itself."""

    def plan(self, batch: Any) -> None:
        """A prefill batch is about to run: decide what each of its requests checkpoints, and find the slots."""
        if self.cache.disable:
            return
        if self.tier is not None:
            self.tier.back_up()
        if self.composer is not None:
            for req in batch.reqs:
                self.composer.commit(req)
        for req, start, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            record = tracked(req)
            record.start = start
            self._arrive(req, record, start)
            self.slots.free_planned(record)
            if requests.streams(req):  # its session keeps what it computes; only the end of a first turn is inserted
                self.decisions.computed(req.rid)
                if record.request is not None:
                    shared = getattr(state_of(req), "cache_protected_len", 0)  # of its first turn, in the tree
                    record.request.tip.unkept = max(0, record.request.prompt_tokens - max(1, int(shared)))
            elif record.request is not None and self.step and not getattr(req, "skip_radix_cache_insert", False):
                self._reserve(record, start, start + length, start + length >= len(req.origin_input_ids))

    def _arrive(self, req: Any, record: Tracked, start: int) -> None:
        core = self.cache.tree_core
        if self._root is not core.root_node:
            if self._root is not None:
                self.decisions.flushed()
            self._root = core.root_node
        if record.request is not None:  # a later chunk, or a request that was retracted
            tip = record.tip_node
            if tip is not None and core._node_arena.get(tip.id) is not tip:
                record.tip_node = None  # evicted meanwhile, or the cache was flushed in a pause
            return
        ids = req.origin_input_ids if self.composer is None else self.composer.keyed(record, req.origin_input_ids)
        record.prompt = tokens = requests.ids(ids)
        record.request = request = self.decisions.arrive(
            req.rid,
            tokens,
            self.now(),
            start,
            max(start, record.known_tokens),
            requests.namespace(req),
            self._boundaries(req, tokens),
            0 if requests.streams(req) else requests.limit(req),  # a session's own KV is in no cache
            self._hints(req),
        )
        if record.segments:
            self.decisions.marked(request, [(*each.range, each.key) for each in record.segments.segments])
        self._use(record, request)
        marked = record.segments.behind(start) if record.segments else ()
        record.misses = attribute(request, self.grid, max(self.grid, self.step), requests.limit(req), marked)
        if record.segments and self.composer is not None:
            record.misses |= record.segments.misses(start, self.composer.index)
        self.account.request(len(tokens), start, record.misses, self.now())

    def _boundaries(self, req: Any, tokens: np.ndarray) -> tuple[int, ...]:
        """Positions of the prompt `tokens` that others will share: ends of messages, and what `req` names.

        On a grid the state at the prompt's end mostly lies before its last message's end, and serves for it.
        """
        found = first_message(tokens, self._message_ends) if self._message_ends else ()
        last = last_message(tokens, self._message_ends) if found else ()
        if last and last[0] < tokens.size // self.grid * self.grid:
            found = tuple(sorted({*found, *last}))
        given = getattr(req.sampling_params, "custom_params", None)
        if given is None:
            return found
        if self.composer is None and marks_segments(given):
            self.account.event("segments_ignored")
        if lost := lost_breakpoints(given):
            self.account.event("breakpoints_lost", lost)
        try:
            declared = named(given, len(tokens))
        except ConfigError as error:  # one that did not come through the HTTP process, which refuses it
            self.account.event("bad_boundaries")
            logger.warning("request %s: %s", req.rid, error)
            return found
        self.account.event("boundaries", len(declared))
        return tuple(sorted({*found, *declared}))

    def _hints(self, req: Any) -> Hints:
        """What `req` says of the time behind it."""
        given = getattr(req.sampling_params, "custom_params", None)
        if given is None:
            return NO_HINTS
        try:
            found = named_hints(given)
        except ConfigError as error:  # as with boundaries
            self.account.event("bad_hints")
            logger.warning("request %s: %s", req.rid, error)
            return NO_HINTS
        self.account.event("hints", int(found is not NO_HINTS))
        return found

    def _use(self, record: Tracked, request: Request) -> None:
        """A request resumes: the state there is used, and may have turned out to be where others part."""
        start = request.cached_tokens
        node = self.cache.tree_core._node_arena.get(record.matched) if start else None
        if node is None or node.parent is None or end_tokens(node) != start:
            return
        held = getattr(node, "hybrid_mark", None)
        branch = self.decisions.branch(request, start, held)
        if branch is not None:
            self._place(node, branch)
            held = branch
        if held is not None:
            self.decisions.resumed(request, held)
            self.victims.touch(node)
        for at in self.decisions.uses(request):
            used = node
            while used.parent is not None and end_tokens(used) > at:
                used = used.parent
            mark = getattr(used, "hybrid_mark", None)
            if end_tokens(used) == at and mark is not None:
                self.decisions.touch(mark)
                self.victims.touch(used)

    def _reserve(self, record: Tracked, start: int, end: int, last: bool) -> None:
        assert record.request is not None
        if record.composed is not None:
            self._reserve_composed(record, record.composed, last)
            return
        wanted_at = places(record.request.positions, start, end, self.grid, self.step, self.cache.page_size)
        if last and self.cache.enable_mamba_extra_buffer:
            wanted_at.pop(own_place(start, end, self.grid), None)
        affordable = self._afford(record.request, wanted_at)
        for at, wanted in sorted(wanted_at.items(), reverse=True):
            if at in affordable and self.slots.reserve(record, at, wanted):
                self.account.planned()
            else:
                self.account.event("refused")
                mark = record.request.marks.get(wanted)
                if mark is not None:
                    mark.refused = True

    def _reserve_composed(self, record: Tracked, made: Pass, last: bool) -> None:
        """Find slots for the checkpoints of a composed pass: its rows can save a state at any place they run."""
        assert record.request is not None
        assert self.composer is not None
        page, window = self.composer.served.page_size, self.composer.seams.window
        wanted = [*record.request.positions, *([record.request.prompt_tokens] if last else ())]
        found = {made.saved_at(at, page, window): at for at in wanted if at > made.start}
        found.pop(0, None)
        if made.end in found and not self.cache.enable_mamba_extra_buffer:
            del found[made.end]  # SGLang saves that one by itself
        affordable = self._afford(record.request, found)
        for at, position in sorted(found.items(), reverse=True):
            if at not in affordable or not self.slots.reserve(record, at, position):
                self.account.event("refused")

    def _afford(self, request: Request, wanted_at: dict[int, int]) -> set[int]:
        """The places of `wanted_at` whose states are worth a slot."""
        if not self.scores or len(wanted_at) <= self.memory.free_states():
            return set(wanted_at)
        contenders = self.decisions.contenders(request, wanted_at, self.now())
        return {contenders[number].end_tokens for number in self.memory.contest(contenders)}

    def found(self, node: Any, record: Tracked | None) -> None:
        """A request computed the state at `node` although it was there, saved by another one meanwhile."""
        mark = getattr(node, "hybrid_mark", None)
        if record is not None and record.request is not None and mark is not None:
            self.decisions.touch(mark)
            self.victims.touch(node)
            self.decisions.saved(record.request, [end_tokens(node)])

    def saved(self, node: Any, mark: Mark, record: Tracked | None) -> None:
        """A state was attached to `node`. An earlier end of the same request is superseded by it."""
        self.decisions.touch(mark)
        if record is not None and record.request is not None:
            end = end_tokens(node)
            record.saved_tokens = max(record.saved_tokens, end)
            self.decisions.saved(record.request, [end])
            if mark is record.request.tip:
                earlier, record.tip_node = record.tip_node, node
                self._supersede(record.request, earlier, node, mark.last_s)
        self._place(node, mark)
        self.victims.touch_below(node)
        if self.tier is not None:
            self.tier.saved(node)
        if self.events is not None:
            self.events.stored(node)

    def _supersede(self, request: Request, earlier: Any, later: Any, now: float) -> None:
        if earlier is None or earlier is later or earlier.hybrid_mark is None:
            return
        old = self.decisions.superseded(request, earlier.hybrid_mark, end_tokens(earlier), now)
        if old is not None:
            self._place(earlier, old)

    def _place(self, node: Any, mark: Mark) -> None:
        """The state of `node` gets `mark`."""
        mark.evicted = False
        changed: Any
        for changed, its in self.decisions.place(mark, node, end_tokens(node), self.now()):
            changed.hybrid_mark = its
            self.victims.touch(changed)

    def left(self, node: Any) -> None:
        """The state of `node` is no longer on the device."""
        self.victims.touch_below(node)
        self.account.event("states_evicted")
        if self.events is not None and self.tier is None:  # with one it may have gone there
            self.events.removed(node)

    def lost(self, node: Any) -> None:
        """The state of `node` is in no tier any more."""
        mark = getattr(node, "hybrid_mark", None)
        if mark is not None:
            self.decisions.evicted(mark)
            node.hybrid_mark = None

    def cached_tokens(self, record: Tracked) -> int:
        """How much of the request is in the cache before it ends."""
        node = record.tip_node
        return end_tokens(node) if node is not None and node.parent is not None else 0

    def finish(self, req: Any, record: Tracked, tokens: int, kept: int) -> None:
        """`req` ended after `tokens` tokens, the first `kept` of which are cached."""
        if record.request is None or record.finished:
            return
        assert record.prompt is not None
        sequence = np.concatenate((record.prompt, requests.ids(req.output_ids)))[:tokens]
        self.decisions.finish(record.request, sequence, self.now(), kept)
        record.finished, record.prompt = True, None

    def ended(self, req: Any, record: Tracked) -> None:
        """`req` gives its memory back. If it was aborted, what its last pass computed is not cached.

        With extra_buffer_lazy SGLang may give up the state at its end alone: its prompt is cached, its answer known.
        """
        if self.composer is not None:
            self.composer.ended(record)
        if req.finished():
            tokens = kept = record.start
            if req.output_ids and not getattr(req, "skip_radix_cache_insert", False):
                tokens = requests.answered(req, len(req.origin_input_ids) + len(req.output_ids) - 1)
                kept = self.cached_tokens(record)
            self.finish(req, record, tokens, kept)
        self.decisions.computed(req.rid)
