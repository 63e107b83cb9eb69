"""What is remembered about one resume point: who made it, how often and when it was last used."""

from enum import IntEnum
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from sglang_hybrid.prefix.tree.node import Node


class Kind(IntEnum):
    """Why a position may be resumed from; the coarse part of a reuse class."""

    FRESH = 0  # end of a request that continued nothing known
    APPENDED = 1  # end of a request that continued an earlier end
    DIVERGED = 2  # end of a request that left an earlier sequence in its middle
    BRANCH = 3  # where sequences part
    SUPERSEDED = 4  # an end whose continuation has its own mark
    DECLARED = 5  # a boundary the caller named, not reused so far


FIRST, LATER, NEAR = range(3)
"""Sites: where in its prompt a position was declared, the first, a later one, or one right before the prompt's end.

The prompt's end is saved anyway, and the next turn of the conversation goes on behind it. So what is declared near it
is most often an end of that conversation, in another word.
"""

GAPS_AVERAGED = 16


@mypyc_attr(acyclic=True)
class Mark:
    """A resume point: a checkpoint in the cache tree, a metadata-only entry in the history, or both at once.

    `last_s` is when it was made or last resumed from (seconds), `touch` the same in the cache's order of uses,
    `gap_s` averages the last gaps between uses, `depth` counts the earlier ends that this one continues, `room` says
    how full the context is there (`classes.room`), `site` where in its prompt it was declared, `hint` is the class of
    what its client said of the time until the next use (`hints`, 0: nothing), `reuse_class` indexes the reuse table.
    `older`, `newer`, `stage` and `node` belong to the history: the neighbours in the order of last use, the stage of
    age they are in (-1: in none), and the node there. `evicted` and `refused` say why a checkpoint is not there: given
    up for another, or never taken for want of memory; `unkept` counts the tokens before the position whose KV was not
    kept, because no state stands behind them; `announced` is a position that nobody has computed so far. `heir` is, of
    a superseded end that the history does not know, the mark of the later end; `dropped` is, of that one, the deepest
    position of such ends that were evicted.

    Compiled marks and nodes are no business of the garbage collector (`acyclic`): a full history has 800,000 of them.
    So whoever links them takes the links apart when they go.
    """

    __slots__ = (
        "announced", "depth", "dropped", "evicted", "gap_s", "heir", "hint", "hits", "kind", "last_s", "newer", "node",
        "older", "refused", "reuse_class", "room", "site", "stage", "touch", "unkept",
    )  # fmt: skip

    def __init__(self, kind: Kind, last_s: float, touch: int = 0) -> None:
        self.kind = kind
        self.depth = 0
        self.room = 0
        self.site = 0
        self.hits = 0
        self.hint = 0
        self.gap_s = 0.0
        self.last_s = last_s
        self.touch = touch
        self.reuse_class = 0
        self.older: Mark | None = None
        self.newer: Mark | None = None
        self.stage = -1
        self.node: Node | None = None
        self.evicted = False
        self.refused = False
        self.unkept = 0
        self.announced = False
        self.heir: Mark | None = None
        self.dropped = 0

    @property
    def shared(self) -> bool:
        """Whether others are to begin here: the conversation that saved it does not supersede it."""
        return self.kind is Kind.BRANCH or (self.kind is Kind.DECLARED and self.site != NEAR)

    def evict(self, position: int) -> None:
        """Its state, behind `position` tokens, was given up; who superseded it knows that from now on."""
        self.evicted = True
        if self.heir is not None:
            self.heir.dropped = max(self.heir.dropped, position)

    def use(self, now: float) -> None:
        """Count one use at `now` seconds: hits, mean gap, last use."""
        self.hits += 1
        self.gap_s += (now - self.last_s - self.gap_s) / min(self.hits, GAPS_AVERAGED)
        self.last_s = now
        self.hint = 0
