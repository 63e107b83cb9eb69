"""A prefix cache with memory for segments beside it: exact prefix first, then segments, as in a server.

The classes that decide are the server's (`segment`). What is simulated is what those of `sim.prefix_cache` are: a
request commits when it comes, states are saved at any token that is run, and passes take no time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.segments import SegmentCosts, segment_costs
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix import policies
from sglang_hybrid.prefix.request import Request
from sglang_hybrid.prefix.reuse.table import ReuseTable
from sglang_hybrid.prefix.tree.tokens import Tokens
from sglang_hybrid.segment.blocks import Blocks
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.segment.index import Costs, SegmentIndex
from sglang_hybrid.segment.keys import NO_TOKEN, Identity
from sglang_hybrid.segment.order import ByValue, Order
from sglang_hybrid.segment.passes import Pass
from sglang_hybrid.segment.prompt import Cached, Limits, SegmentedPrompt
from sglang_hybrid.segment.slabs import Cut
from sglang_hybrid.sim.prefix_cache import PrefixCache
from sglang_hybrid.sim.saving import Saving
from sglang_hybrid.sim.trace import TraceRequest

_CODES = 1 << 30  # above every token: of a vocabulary, and of a request log


@dataclass(frozen=True)
class Memory:
    """What segments have: `total_bytes`, of which each takes `dtype`'s share, `seam_tokens` at its ends, and passes of
    `pass_tokens` (a server's --chunked-prefill-size), into which one has to fit. `kept` is the share of transitions
    that do not vanish: it depends on a model's weights, and a server says it (`/hybrid/segments`)."""

    total_bytes: int
    dtype: str = "bfloat16"
    seam_tokens: int = 8
    pass_tokens: int = 8192
    kept: float = 1.0


@dataclass(frozen=True)
class Served:
    """One request: tokens skipped for its exact prefix, tokens that reused segments stood for, tokens and FLOPs that
    were run, and of the segments that it `marked` how many were `kept`, as a segment or in the prefix."""

    hit_tokens: int
    reused_tokens: int
    run_tokens: int
    flops: float
    marked: int
    kept: int


class SegmentCache(PrefixCache):
    """Prefixes in `capacity_bytes` under `policy`, and segments in `memory`, which leave in `order`.

    Raises ConfigError for a model without segments, and for memory that does not hold one.
    """

    def __init__(
        self,
        model: ModelSpec,
        capacity_bytes: int,
        memory: Memory,
        policy: str | policies.Policy = policies.DEFAULT,
        order: Callable[[ReuseTable, Costs], Order] = ByValue,
        saving: Saving | None = None,
    ) -> None:
        super().__init__(model, capacity_bytes, policy, saving)
        self.costs = costs = segment_costs(model, memory.dtype)
        self.memory, self.seams = memory, Seams(memory.seam_tokens, costs.window)
        self.identity = identity(self.seams)
        blocks = blocks_of(costs, memory.total_bytes // costs.block_bytes)
        if not blocks.ever_fit(1, costs.transitions):
            least = blocks.filled(1, 1, costs.transitions)
            raise ConfigError(
                f"segments of {model.name} need {least * costs.block_bytes / 1e9:.3f} GB or more, blocks for states "
                f"and one for KV; raise --segments-gb: {memory.total_bytes / 1e9:g}"
            )
        held = Costs(model, costs.state_bytes, costs.token_bytes, 1, costs.transitions, costs.transition_bytes)
        self.index = SegmentIndex(blocks, held, order=order)
        self._passes: list[Pass] = []
        self._codes: dict[int, int] = {}

    def serve(self, request: TraceRequest) -> Served:
        """Serve `request` from its arrival to its end."""
        if not request.segments:
            start = self.lookup(request.input_tokens, request.ts)
            self.commit(request.tokens, request.n_input, request.ts, request.boundaries, request.hints)
            flops = float(self.model.prefill_flops(request.n_input, start))
            return Served(start, 0, request.n_input - start, flops, 0, 0)
        prompt = prompt_of(request, self.seams, self.identity)
        prompt.compose(self._way(prompt, request))
        start = self._cached(prompt.keyed(prompt.ids), request).tokens
        run, flops = self._run(prompt, start, request)
        whole = prompt.keyed(array("q", request.tokens.tolist()))
        boundaries = self._boundaries(prompt, request)
        self.commit(self._tokens(whole), request.n_input, request.ts, boundaries, request.hints)
        self._passes = []
        kept = sum(each.range[1] <= start or (each.composed and not each.reason) for each in prompt.segments)
        return Served(start, prompt.reused_tokens, run, flops, len(prompt.segments), kept)

    def _way(self, prompt: SegmentedPrompt, request: TraceRequest) -> frozenset[int]:
        """The segments of `prompt` that are plain text."""
        return prompt.way(prompt.ids, lambda key: self._cached(key, request), self.index)

    def _boundaries(self, prompt: SegmentedPrompt, request: TraceRequest) -> tuple[int, ...]:
        """Positions whose states are saved, beside those that the policy chooses."""
        return request.boundaries

    def _cached(self, key: array[int], request: TraceRequest) -> Cached:
        found = self._match(self._tokens(key), request.ts)
        return Cached(found.resume_tokens, max(found.resume_tokens, found.kv_tokens))

    def _run(self, prompt: SegmentedPrompt, start: int, request: TraceRequest) -> tuple[int, float]:
        """Run the passes of `prompt` from `start` on; tokens and FLOPs."""
        now, limits = self._elapsed.look(request.ts), Limits(self.memory.pass_tokens, self.memory.pass_tokens)
        run, flops, end = 0, 0.0, len(prompt.ids)
        while start < end:
            assert prompt.begin(start, end, limits, self.index, now) is not None
            made = prompt.commit(self.index)
            self._passes.append(made)
            for cold in made.cold:
                self.index.settle(cold.entry, round(self.memory.kept * self.costs.transitions))
            start, run = made.end, run + made.run_tokens
            flops += run_flops(made, self.model, self.costs)
        prompt.end(self.index)
        return run, flops

    def _tokens(self, key: array[int]) -> Tokens:
        """`key` as the tree has it: int32, with numbers for the codes that stand for interiors."""
        wide = np.array(key, np.int64)
        for at in np.flatnonzero(wide >= NO_TOKEN).tolist():
            wide[at] = self._codes.setdefault(int(wide[at]), _CODES + len(self._codes))
        return wide.astype(np.int32)

    def _places(self, request: Request, positions: list[int], total: int) -> dict[int, int]:
        """States lie where tokens are run, never in an interior."""
        if not self._passes:
            return super()._places(request, positions, total)
        found: dict[int, int] = {}
        for wanted in positions:
            inside = next((made for made in self._passes if made.start < wanted <= made.end), None)
            at = wanted if inside is None else inside.saved_at(wanted, 1, self.seams.window)
            if at:
                found[at] = wanted
        return found

    def segment_bytes(self) -> int:
        """Bytes that segments hold."""
        blocks, costs = self.index.blocks, self.costs
        whole = (blocks.count - blocks.free) * costs.block_bytes
        return whole - blocks.kv.free * costs.token_bytes - blocks.transitions.free * costs.transition_bytes

    def check(self) -> None:
        super().check()
        self.index.check()
        assert all(not entry.pins for entry in self.index)


def blocks_of(costs: SegmentCosts, count: int) -> Blocks:
    """`count` blocks, as a server's buffer has them."""
    return Blocks(count, Cut(costs.block_tokens), transitions=Cut(costs.block_transitions))


def identity(seams: Seams) -> Identity:
    """What tells the segments of a simulated server from others: nothing, it has one model."""
    return Identity("simulated", seams.head, seams.tail)


def prompt_of(request: TraceRequest, seams: Seams, its: Identity) -> SegmentedPrompt:
    """The segments that `request` marks."""
    names = [each.name for each in request.segments]
    ranges = tuple((each.start, each.end) for each in request.segments)
    ids = array("q", request.input_tokens.tolist())
    return SegmentedPrompt(ids, ranges, seams, its, names=names if max(names, default=-1) >= 0 else None)


def run_flops(made: Pass, model: ModelSpec, costs: SegmentCosts) -> float:
    """FLOPs of a pass: its rows in their context, segments that are made by themselves, and jumps."""
    rows = sum(float(model.prefill_flops(row.end, row.start)) for row in made.rows)
    cold = sum(float(model.prefill_flops(cold.tokens)) for cold in made.cold)
    return rows + cold + costs.jump_flops * sum(row.jump is not None for row in made.rows)
