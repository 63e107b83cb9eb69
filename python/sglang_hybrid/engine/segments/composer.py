"""The segments of one scheduler: what requests mark, how a composed prompt is matched, and what its passes do."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache import requests
from sglang_hybrid.engine.cache.requests import Tracked, tracked
from sglang_hybrid.engine.segments import marked
from sglang_hybrid.engine.segments.batch import Composed, Making
from sglang_hybrid.engine.segments.listing import Births
from sglang_hybrid.engine.segments.operators import Operators
from sglang_hybrid.engine.segments.settling import Settling
from sglang_hybrid.engine.segments.store import Store
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.segment.index import SegmentIndex
from sglang_hybrid.segment.keys import Identity
from sglang_hybrid.segment.leases import Leases
from sglang_hybrid.segment.prompt import Cached, SegmentedPrompt

if TYPE_CHECKING:
    from sglang_hybrid.engine.cache.memory import Memory
    from sglang_hybrid.engine.segments.exchange import Exchange

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What a rank serves: which linear and attention layers it has, by SGLang's numbers of layers, how keys turn
    (`rope.frequencies`), the tokens of a page and of the largest pass, and `--hybrid-segment-mode`."""

    linear_layers: dict[int, int]
    attention_layers: tuple[int, ...]
    frequencies: tuple[Any, bool] | None
    page_size: int
    most: int
    mode: str = "transition"


class Composer:
    """Shared by the hooks of one scheduler. `now` gives seconds, the same on every rank; `event` counts one.

    `memory` is what prompts get KV and states from. With `leases` what a pass relies on stays until it has run. With an
    `exchange` other servers compute segments for this one.
    """

    def __init__(
        self,
        store: Store,
        index: SegmentIndex,
        seams: Seams,
        fingerprint: str,
        served: Served,
        now: Callable[[], float],
        event: Callable[..., None],
        memory: Memory,
        settling: Settling,
        leases: Leases | None = None,
    ) -> None:
        self.store, self.index, self.seams, self.served = store, index, seams, served
        self.identity = Identity(fingerprint, seams.head, seams.tail)
        self.births = Births()
        self.memory, self.settling, self.leases = memory, settling, leases
        self.exchange: Exchange | None = None
        self.now = now
        self._event = event
        self._told: dict[str, int] = {}

    def prompt(self, req: Any) -> SegmentedPrompt | None:
        """The segments that `req` marks, None if it marks none; read on first use."""
        record = tracked(req)
        if record.segments is None:
            record.segments = self._read(req) or False
        return record.segments or None

    def _read(self, req: Any) -> SegmentedPrompt | None:
        given = getattr(req.sampling_params, "custom_params", None)
        if lost := marked.lost(given):
            self._event("segments_lost", lost)
        try:
            ranges = marked.named(given, len(req.origin_input_ids))
        except ConfigError as error:  # one that did not come through the HTTP process, which refuses it
            self._event("bad_segments")
            logger.warning("request %s: %s", req.rid, error)
            return None
        if not ranges:
            return None
        made = SegmentedPrompt(
            req.origin_input_ids,
            ranges,
            self.seams,
            self.identity,
            requests.namespace(req),
            ahead=marked.ahead(given),
        )
        if self.served.mode == "full" or unable(req):
            made.forbid()
        return made

    def match(self, params: Any, match: Callable[[Any], Any]) -> Any:
        """What is cached of a request's prompt; of one that marks segments, along the cheapest way to compose it."""
        prompt = self.prompt(params.req)
        if prompt is None:
            return match(params)
        ids = params.key.token_ids
        if params.cow_mamba:  # it begins; one that runs already has its own path
            prompt.restart(self.index)
            probe = dataclasses.replace(params, req=None, cow_mamba=False)

            def cached(key: Any) -> Cached:
                found = match(_rekeyed(probe, key))
                return Cached(compat.matched_tokens(found), found.full_kv_hit_length)

            prompt.compose(prompt.way(ids, cached, self.index))
        return match(_rekeyed(params, prompt.keyed(ids)))

    def keyed(self, record: Tracked, ids: Any) -> Any:
        """`ids` of a request as the prefix tree keys them."""
        return record.segments.keyed(ids) if record.segments else ids

    def rekey(self, record: Tracked, params: Any) -> None:
        """Give SGLang's insertion `params` of a request the key of its composed prompt."""
        if record.segments:
            params.key = _keyed(params.key, record.segments.keyed(params.key.token_ids))

    def commit(self, req: Any) -> None:
        """The pass of `req` that was decided on, if any, will run."""
        record = tracked(req)
        opened = record.segments.open if record.segments else None
        if self.leases is not None and opened is not None:
            self.leases.hold(opened.entries)
        made = record.segments.commit(self.index) if record.segments and opened is not None else None
        for cold in made.cold if made is not None and record.segments else ():
            alive = (entry.number for entry in self.index)
            self.births.made(cold.entry, self.now(), record.segments.namespace, alive)
        record.composed = made if made is not None and made.composed else None
        self.tell()

    def tell(self) -> None:
        """Tell the account what happened to entries since the last time."""
        for field in dataclasses.fields(self.index.counts):
            count = getattr(self.index.counts, field.name)
            self._event(f"segments_{field.name}", count - self._told.get(field.name, 0))
            self._told[field.name] = count

    def composed(self, batch: Any) -> list[Composed]:
        """The requests of `batch` whose pass is composed."""
        found = []
        for row, req in enumerate(batch.reqs):
            record = tracked(req)
            if record.composed is not None:
                checkpoints = tuple(c for c in record.planned if c.slot is not None)
                ids = req.full_untruncated_fill_ids
                state, table = req.kv.mamba_pool_idx, int(req.kv.req_pool_idx)
                found.append(Composed(row, record.composed, ids, state, table, checkpoints))
        return found

    def operators(self, making: Making | None) -> Operators | None:
        """Where a pass puts what the segments do to states that it makes, if it makes any."""
        if making is None:
            return None
        layers, adds = self.store.shapes.linear_layers, self.served.mode == "addition"
        return Operators(making, layers, partial(self.settling.launched, making.entries), adds)

    def turn(self) -> None:
        """A round of the scheduler begins."""
        self.settling.turn()
        if self.leases is not None:
            self.leases.turn()

    def ended(self, record: Tracked) -> None:
        """The request of `record` gave its memory back."""
        if record.segments:
            record.segments.end(self.index)

    def clear(self) -> None:
        """The cache was emptied, which happens while nothing runs."""
        if self.leases is not None:
            self.leases.end()
        self.index.clear()
        self.tell()


def unable(req: Any) -> bool:
    """Whether `req` may reuse no segment: what it asks for needs every token of its prompt to be run."""
    return bool(
        requests.limit(req) < len(req.origin_input_ids)
        or requests.streams(req)
        or req.return_hidden_states
        or req.input_embeds is not None
        or req.multimodal_inputs is not None
        or req.positional_embed_overrides is not None
    )


def _rekeyed(params: Any, ids: Any) -> Any:
    return dataclasses.replace(params, key=_keyed(params.key, ids))


def _keyed(key: Any, ids: Any) -> Any:
    """SGLang's `key` with other ids."""
    if ids is key.token_ids:
        return key
    return type(key)(ids, extra_key=key.extra_key, is_bigram=key.is_bigram, limit=key.limit, cache_salt=key.cache_salt)
