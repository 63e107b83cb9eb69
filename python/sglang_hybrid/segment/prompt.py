"""The segments of one prompt: which are reused, which are computed and kept, and how far a pass goes."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.segment.geometry import Range, Seams
from sglang_hybrid.segment.index import COLD, EVICTED, REFUSED, Entry, SegmentIndex
from sglang_hybrid.segment.keys import CODES, Identity, Key, codes
from sglang_hybrid.segment.passes import Cold, Pass, assemble

SHORT, LONG, INELIGIBLE, SEAM = "segment_short", "segment_long", "segment_ineligible", "segment_seam"
"""Why tokens of a segment are computed like plain text, as `prefix.misses` names it."""


@dataclass(eq=False, slots=True)
class Segment:
    """A marked range of a prompt. `composed` says whether an entry stands for its interior, or will once a pass comes
    to it: then its codes stand in the prompt's key. `decided` says that a pass came, `entry` is what that relies on.
    `reason` says why it is computed, empty: it is not.
    """

    range: Range
    interior: Range
    key: Key
    able: bool
    composed: bool
    reason: str = ""
    entry: Entry | None = None
    decided: bool = False

    @property
    def tokens(self) -> int:
        return self.range[1] - self.range[0]


class Cached(NamedTuple):
    """What is cached along a key: a prompt can go on behind `tokens`; of `known`, no fewer, there is KV."""

    tokens: int
    known: int


_VAIN = 4
"""Ways that are looked at one after the other and of which nothing more is cached, before the search is over."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pass may run: `tokens` through the model now, `most` in an empty pass; it ends at a multiple of `page`."""

    tokens: int
    most: int
    page: int = 1


@dataclass(slots=True)
class SegmentedPrompt:
    """The segments of one prompt `ids` (int64), from its arrival to the end of its prefill.

    A pass is decided on by `begin`, and then either runs (`commit`) or does not (`revoke`). `names` are what segments
    are known by where tokens do not tell it, as in a log of hashes; otherwise it is their tokens. What is made for a
    prompt that is `ahead` is owed to the one that comes behind it.
    """

    ids: array[int]
    ranges: tuple[Range, ...]
    seams: Seams
    identity: Identity
    namespace: str | None = None
    names: Sequence[int] | None = None
    ahead: bool = False
    segments: list[Segment] = field(init=False)
    reused_tokens: int = 0
    _pending: Entry | None = None
    _open: Pass | None = None
    _cold: list[Cold] = field(default_factory=list)
    _new: list[Segment] = field(default_factory=list)
    _marks: dict[Key, Mark] = field(default_factory=dict)
    _owed: dict[Key, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.segments = [self._segment(number, each) for number, each in enumerate(self.ranges)]

    def _segment(self, number: int, range_: Range) -> Segment:
        low, high = range_
        interior = self.seams.interior(range_)
        # Some token of the prompt has to be run behind the last interior: its logits are asked for.
        able = high - low >= self.seams.least and interior[1] < len(self.ids)
        about = self.ids[low:high] if self.names is None else array("q", (self.names[number], high - low))
        key = self.identity.key(about, self.namespace)
        return Segment(range_, interior, key, able, able, "" if able else SHORT)

    def forbid(self) -> None:
        """The request may reuse no segment."""
        for each in self.segments:
            each.able = each.composed = False
            each.reason = INELIGIBLE

    def keyed(self, ids: array[int], plain: frozenset[int] | None = None) -> array[int]:
        """`ids` of the prompt and what follows, as the prefix tree keys them; as if `plain` were not composed."""
        found: array[int] | None = None
        for n, each in enumerate(self.segments):
            at = each.interior[0]
            if at < len(ids) and (each.composed if plain is None else each.able and n not in plain):
                found = ids[:] if found is None else found
                found[at : at + CODES] = codes(each.key)[: len(ids) - at]
        return ids if found is None else found

    def first_behind(self, position: int) -> int:
        """The number of the first segment that ends behind `position`, their count if none does."""
        return next((n for n, each in enumerate(self.segments) if each.range[1] > position), len(self.segments))

    def run_tokens(self, start: int, index: SegmentIndex) -> int:
        """Tokens to be run from `start` on, if what begins behind it is composed and nothing is made."""
        saved = 0
        for each in self.segments:
            if each.able and each.interior[0] >= start and index.find(each.key) is not None:
                saved += each.interior[1] - each.interior[0]
        return len(self.ids) - start - saved

    def reach(self, start: int, tokens: int) -> int:
        """Tokens over which a pass from `start` that runs `tokens` advances at most."""
        copied = sum(
            each.interior[1] - max(start, each.interior[0])
            for each in self.segments[self.first_behind(start) :]
            if each.composed and each.interior[1] > start
        )
        return tokens + copied

    def misses(self, start: int, index: SegmentIndex) -> dict[str, int]:
        """Tokens of segments that are computed behind `start`, by reason. What no pass came to is foretold."""
        found: Counter[str] = Counter()
        for low, high, each in self._ranges(start):
            inside = max(0, min(high, each.interior[1]) - max(low, each.interior[0])) if each.composed else high - low
            reason = each.reason
            if not each.decided and each.composed:
                reason = self._owed.get(each.key, "") if index.find(each.key) is not None else COLD
            found[SEAM] += high - low - inside
            if reason:
                found[reason] += inside
        return {reason: count for reason, count in found.items() if count}

    def behind(self, start: int) -> list[Range]:
        """The parts behind `start` of the segments that `misses` counts."""
        return [(low, high) for low, high, _ in self._ranges(start)]

    def _ranges(self, start: int) -> Iterator[tuple[int, int, Segment]]:
        for each in self.segments[self.first_behind(start) :]:
            if each.composed or each.reason:
                yield max(start, each.range[0]), each.range[1], each

    def way(self, ids: array[int], cached: Callable[[array[int]], Cached], index: SegmentIndex) -> frozenset[int]:
        """The segments to take for plain text so that the fewest tokens are run: their numbers, for `compose`.

        What is cached of `ids`, those of the prompt that may be found, `cached` says along a key. Earlier requests have
        composed a segment or computed it, so there are paths of both kinds: all composed and all plain are looked at,
        then the other kind at each segment that a path came to, deepest first. Of ways that are alike the one of which
        most is cached is taken, then the one that composes most.
        """
        able = [n for n, each in enumerate(self.segments) if each.able and each.interior[0] < len(ids)]
        seen: dict[frozenset[int], Cached] = {}
        turns: list[tuple[int, list[int]]] = []  # -n, and who is plain if the way is another one at segment n

        def look(plain: frozenset[int], turn: int) -> bool:
            """Whether something is cached behind where the way begins to differ, in the segment `turn`."""
            seen[plain] = found = cached(self.keyed(ids, plain))
            if turn >= 0 and found.known <= self.segments[turn].interior[0]:
                return False
            for n in able:
                if n > turn:
                    heappush(turns, (-n, [*(each for each in able if each < n and each in plain), *({n} - plain)]))
                if self.segments[n].interior[0] >= found.known:
                    break
            return True

        for plain in dict.fromkeys((frozenset[int](), frozenset(able))):
            look(plain, -1)
        vain = 0
        while turns and vain < _VAIN:
            turn, numbers = heappop(turns)
            if (plain := frozenset(numbers)) not in seen:
                vain = 0 if look(plain, -turn) else vain + 1
        ways = ((found.tokens, self._plain_before(found.tokens, plain)) for plain, found in seen.items())
        return min(ways, key=lambda each: (self.run_tokens(each[0], index), -each[0], len(each[1]), sorted(each[1])))[1]

    def _plain_before(self, start: int, plain: frozenset[int]) -> frozenset[int]:
        """Those of `plain` that begin before `start`."""
        return frozenset(n for n in plain if self.segments[n].interior[0] < start)

    def compose(self, plain: Collection[int] = ()) -> None:
        """The segments `plain` are plain text, the others are composed. Before the first pass is decided on."""
        for n, each in enumerate(self.segments):
            each.composed = each.able and n not in plain

    @property
    def open(self) -> Pass | None:
        """The pass that was decided on and neither runs nor was revoked."""
        return self._open

    def begin(self, start: int, total: int, limits: Limits, index: SegmentIndex, now: float) -> Pass | None:
        """Decide on a pass from `start` over a sequence of `total` tokens; None if it could run nothing now.

        Passes of several prompts may be open at once, one batch: they are revoked in the reverse order, or all run.
        """
        self.revoke(index)
        while True:
            made, blocked = self._decided(start, total, limits, index, now)
            if made.end > start and made.run_tokens:
                self._open = made
                return made
            self.revoke(index)
            if blocked is None or limits.tokens < limits.most:
                return None
            _set_plain(blocked, LONG)  # with what lies between it and a page's end it fits into no pass

    def _decided(
        self, start: int, total: int, limits: Limits, index: SegmentIndex, now: float
    ) -> tuple[Pass, Segment | None]:
        """The longest pass within `limits`, and the segment at which it ends for want of tokens to make its entry."""
        end, left, stop, blocked = start, limits.tokens, total, None
        for each in self.segments[self.first_behind(start) :]:
            low, high = each.interior
            if low >= total:
                break
            if not each.composed or high <= start:
                continue
            if not each.decided and start > low:
                each.composed = False  # what is cached ends inside it, computed as plain text
                continue
            if low - end > left:
                break
            left -= max(0, low - end)
            end = max(end, low)
            if not each.decided and index.find(each.key) is None:
                if each.tokens > limits.most:
                    _set_plain(each, LONG)
                    continue
                if _price(each, limits.page, total) > left:
                    stop, blocked = low, each
                    break
            if not each.decided:
                left -= self._decide(each, index, now)
            if each.entry is not None:
                end = max(end, high)
        end = min(end + left, stop)
        end = end if end >= total else max(start, end // limits.page * limits.page)
        for each in [each for each in self._new if each.interior[0] >= end]:
            self._undecide(each, index)  # the pass does not come to it
        interiors = [(each.interior, each.range[0], each.entry) for each in self.segments if each.entry is not None]
        return replace(assemble(start, end, interiors, self._pending), cold=tuple(self._cold)), blocked

    def _decide(self, each: Segment, index: SegmentIndex, now: float) -> int:
        """Reuse `each`, make its entry, or take it for plain text; returns the tokens that are run to make it."""
        entry, cold = index.find(each.key), 0
        self._claim(entry)
        if each.key not in self._marks:
            self._marks[each.key] = index.sight(each.key, now)
        mark = self._marks[each.key]
        if entry is not None:
            index.pin(entry)
            each.reason = self._owed.get(each.key, "")
        else:
            each.reason = EVICTED if mark.evicted else COLD
            entry = index.admit(each.key, each.interior[1] - each.interior[0], mark, now)
            if entry is None:
                each.composed, each.reason = False, REFUSED
            else:
                self._cold.append(Cold(entry, *each.range, each.interior))
                cold = each.tokens
        each.entry, each.decided = entry, True
        self._new.append(each)
        return cold

    def _claim(self, entry: Entry | None) -> None:
        """`entry` was made for this prompt, if it is owed to one that comes behind it."""
        if entry is not None and entry.owed is not None and not self.ahead:
            self._marks[entry.key], self._owed[entry.key], entry.owed = entry.mark, entry.owed, None

    def commit(self, index: SegmentIndex) -> Pass:
        """The open pass will run: what it makes is there for those that come behind it."""
        made = self._open
        if made is None:
            raise InvariantError(f"a pass runs that was decided on before: {len(self.segments)} segments")
        if any(segment.entry is not None and segment.entry.void for segment in self._new):
            raise InvariantError(f"who relies on an entry that is not made begins its pass anew: {made.start}")
        for segment in self.segments:
            if segment.able and not segment.decided:  # of a later pass, whose reason is foretold
                self._claim(index.find(segment.key))
        self._open, self._pending, fresh = None, made.pending, [cold.entry for cold in made.cold]
        reasons = {segment.entry: segment.reason for segment in self._new}
        for entry in fresh:
            entry.making, entry.owed = False, reasons.get(entry) if self.ahead else None
        hits = {segment.range[0] for segment in self.segments if not segment.reason}
        reused = sum(copy.tokens for copy in made.copies if copy.delta in hits)
        self.reused_tokens += reused
        index.counts.reused_tokens += reused
        for segment in self._new:
            if segment.entry is not None and not segment.reason:
                segment.entry.hits += 1
                index.counts.hits += 1
            index.counts.refused += segment.reason == REFUSED
        index.counts.made += len(fresh)
        self._new.clear()
        self._cold.clear()
        for segment in self.segments:
            if segment.entry is not None and segment.interior[0] < made.end and segment.entry is not made.pending:
                self._let_go(segment, index)
        return made

    def revoke(self, index: SegmentIndex) -> None:
        """The open pass does not run: as if it had not been decided on."""
        self._open = None
        for segment in list(self._new):
            self._undecide(segment, index)

    def _undecide(self, segment: Segment, index: SegmentIndex) -> None:
        its = next((cold for cold in self._cold if cold.start == segment.range[0]), None)
        if its is not None:
            self._cold.remove(its)
            index.abandon(its.entry)
        self._let_go(segment, index)
        segment.decided, segment.composed, segment.reason = False, True, ""
        self._new.remove(segment)

    def end(self, index: SegmentIndex) -> None:
        """The prefill is over, maybe in its middle: nothing relies on entries for it any more."""
        self.revoke(index)
        self._pending = None
        for segment in self.segments:
            self._let_go(segment, index)

    def restart(self, index: SegmentIndex) -> None:
        """The request will begin anew: it was retracted."""
        self.end(index)
        for segment in self.segments:
            segment.decided, segment.composed = False, segment.able
            if segment.able:
                segment.reason = ""

    @staticmethod
    def _let_go(segment: Segment, index: SegmentIndex) -> None:
        entry, segment.entry = segment.entry, None
        if entry is not None:
            index.unpin(entry)


def _price(each: Segment, page: int, total: int) -> int:
    """Tokens that are run to make the entry of `each` in a pass that comes to its interior.

    All of the segment is run; and what follows up to a page's end, if none lies inside the interior.
    """
    low, high = each.interior
    return each.tokens + max(0, min((low // page + 1) * page, total) - high)


def _set_plain(each: Segment, reason: str) -> None:
    """`each` is computed like plain text for this request, whatever becomes of the pass."""
    each.composed, each.decided, each.reason = False, True, reason
