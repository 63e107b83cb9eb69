"""The segments of one prompt: which are reused, which are computed and kept, and how far a pass goes."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from sglang_hybrid.segment.geometry import Range, Seams
from sglang_hybrid.segment.index import COLD, REFUSED, Entry, SegmentIndex
from sglang_hybrid.segment.keys import Identity, Key, code
from sglang_hybrid.segment.passes import Cold, Pass, assemble

SHORT, LONG, INELIGIBLE, SEAM = "segment_short", "segment_long", "segment_ineligible", "segment_seam"
"""Why tokens of a segment are computed like plain text, as `prefix.misses` names it."""


@dataclass(slots=True)
class Segment:
    """A marked range of a prompt. `composed` says whether an entry stands for its interior, or will once a pass comes
    to it; `decided` that one came. `entry` is what that pass relies on. `reason` says why it is computed, empty: it is
    not.
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pass may run: `tokens` through the model now, `most` in an empty pass; it ends at a multiple of `page`."""

    tokens: int
    most: int
    page: int = 1


@dataclass(slots=True)
class SegmentedPrompt:
    """The segments of one prompt `ids` (int64), from its arrival to the end of its prefill.

    A pass is decided on by `begin`, and then either runs (`commit`) or does not (`revoke`).
    """

    ids: array[int]
    ranges: tuple[Range, ...]
    seams: Seams
    identity: Identity
    namespace: str | None = None
    segments: list[Segment] = field(init=False)
    reused_tokens: int = 0
    _pending: Entry | None = None
    _open: Pass | None = None
    _new: list[Segment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.segments = [self._segment(each) for each in self.ranges]

    def _segment(self, range_: Range) -> Segment:
        low, high = range_
        interior = self.seams.interior(range_)
        # Some token of the prompt has to be run behind the last interior: its logits are asked for.
        able = high - low >= self.seams.least and interior[1] < len(self.ids)
        key = self.identity.key(self.ids[low:high], self.namespace)
        return Segment(range_, interior, key, able, able, "" if able else SHORT)

    def forbid(self) -> None:
        """The request may reuse no segment."""
        for each in self.segments:
            each.able, each.composed, each.reason = False, False, INELIGIBLE

    def keyed(self, ids: array[int], number: int | None = None) -> array[int]:
        """`ids` of the prompt and what follows, as the prefix tree keys them; `number`: as if composed from there."""
        found: array[int] | None = None
        for n, each in enumerate(self.segments):
            at = each.interior[0]
            if at < len(ids) and (each.composed if number is None else each.able and n >= number):
                found = ids[:] if found is None else found
                found[at] = code(each.key)
        return ids if found is None else found

    def first_behind(self, position: int) -> int:
        """The number of the first segment that ends behind `position`, their count if none does."""
        return next((n for n, each in enumerate(self.segments) if each.range[1] > position), len(self.segments))

    def run_tokens(self, number: int, start: int, index: SegmentIndex) -> int:
        """Tokens to be run from `start` on, if segments from `number` on are composed and nothing is made."""
        saved = 0
        for each in self.segments[number:]:
            if each.able and each.interior[0] >= start and index.find(each.key) is not None:
                saved += each.interior[1] - each.interior[0]
        return len(self.ids) - start - saved

    def misses(self, start: int, index: SegmentIndex) -> dict[str, int]:
        """Tokens of segments that are computed behind `start`, by reason. What no pass came to is foretold."""
        found: Counter[str] = Counter()
        for low, high, each in self._ranges(start):
            inside = max(0, min(high, each.interior[1]) - max(low, each.interior[0])) if each.composed else high - low
            reason = each.reason
            if not each.decided and each.composed:
                reason = "" if index.find(each.key) is not None else COLD
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

    def compose_from(self, number: int) -> None:
        """Segments before `number` are plain text, the others are composed. Before the first pass is decided on."""
        for n, each in enumerate(self.segments):
            each.composed = each.able and n >= number

    @property
    def open(self) -> Pass | None:
        """The pass that was decided on and neither runs nor was revoked."""
        return self._open

    def begin(self, start: int, total: int, limits: Limits, index: SegmentIndex, now: float) -> Pass | None:
        """Decide on a pass from `start` over a sequence of `total` tokens; None if it could run nothing now."""
        self.revoke(index)
        end, left, stop = start, limits.tokens, total
        cold: list[Cold] = []
        for each in self.segments[self.first_behind(start) :]:
            low, high = each.interior
            if not each.composed or low >= total or high <= start:
                continue
            if not each.decided and start > low:
                each.composed = False  # what is cached ends inside it, computed as plain text
                continue
            if low - end > left:
                break
            left -= max(0, low - end)
            end = max(end, low)
            if not each.decided:
                price = self._price(each, limits, index)
                if price > left:
                    stop = low
                    break
                made = self._decide(each, index, now)
                if made is not None:
                    left -= price
                    cold.append(made)
            if each.entry is not None:
                end = max(end, high)
        end = min(end + left, stop)
        end = end if end >= total else max(start, end // limits.page * limits.page)
        interiors = [(each.interior, each.range[0], each.entry) for each in self.segments if each.entry is not None]
        self._open = replace(assemble(start, end, interiors, self._pending), cold=tuple(cold))
        if not self._open.run_tokens:
            self.revoke(index)
        return self._open

    def _price(self, each: Segment, limits: Limits, index: SegmentIndex) -> int:
        """Tokens that would be run to make the entry of `each`, 0 if there is one or the segment is too long for that.

        All of the segment is run, and its tail up to a page's end if no page ends inside the interior: so a pass that
        makes an entry also ends behind where its interior begins.
        """
        if index.find(each.key) is not None:
            return 0
        low, high = each.interior
        price = each.tokens + max(0, (low // limits.page + 1) * limits.page - high)
        # In an empty pass, what is left of a page before the segment and its head come first.
        if price + limits.page + self.seams.head > limits.most:
            each.reason = LONG
            return 0
        return price

    def _decide(self, each: Segment, index: SegmentIndex, now: float) -> Cold | None:
        """Reuse `each`, make its entry (returned), or take it for plain text."""
        entry, made = index.find(each.key), None
        mark, why = index.sight(each.key, now)
        if entry is not None:
            index.pin(entry)
            each.reason = ""
        elif each.reason == LONG:
            each.composed = False
        else:
            entry = index.admit(each.key, each.interior[1] - each.interior[0], mark, now)
            each.composed, each.reason = entry is not None, why if entry is not None else REFUSED
            made = None if entry is None else Cold(entry, *each.range, each.interior)
        each.entry, each.decided = entry, True
        self._new.append(each)
        return made

    def commit(self, index: SegmentIndex) -> Pass:
        """The open pass will run: what it makes is there for those that come behind it."""
        made, self._open = self._open, None
        assert made is not None, "commit follows upon begin"
        for cold in made.cold:
            cold.entry.making = False
        hits = {segment.range[0] for segment in self.segments if not segment.reason}
        reused = sum(copy.tokens for copy in made.copies if copy.delta in hits)
        self.reused_tokens += reused
        index.counts.reused_tokens += reused
        for segment in self._new:
            if segment.entry is not None and not segment.reason:
                segment.entry.hits += 1
                index.counts.hits += 1
        self._new.clear()
        self._pending = made.pending
        for segment in self.segments:
            if segment.entry is not None and segment.interior[0] < made.end and segment.entry is not made.pending:
                self._let_go(segment, index)
        return made

    def revoke(self, index: SegmentIndex) -> None:
        """The open pass does not run: as if it had not been decided on."""
        self._open = None
        for segment in self._new:
            if segment.entry is not None and segment.reason:  # its own: others may rely on one that they are making
                index.drop(segment.entry)
            self._let_go(segment, index)
            segment.decided, segment.composed, segment.reason = False, True, ""
        self._new.clear()

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
