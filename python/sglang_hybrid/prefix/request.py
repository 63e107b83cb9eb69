"""One request, from its arrival to its end, as admission, the history, the guard and the miss reasons see it."""

from mypy_extensions import mypyc_attr

from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.prefix.tree.tokens import Tokens

NO_LIMIT = 1 << 62


@mypyc_attr(allow_interpreted_subclasses=True)
class Request:
    """A request and what was known when its prefill began. Positions and lengths count tokens of its prompt:

        0      cached_tokens     kv_tokens      seen_tokens      prompt_tokens
        |------------|---------------|---------------|-----------------|
        | skipped    | KV is cached, | computed by   | never computed  |
        |            | state is not  | a request     | before          |

    Its prefill began at `arrived_s` (seconds) and resumes at `cached_tokens`, the deepest saved state. `kept_tokens` of
    `seen_tokens` were cached by the latest request that had all of them (-1: unknown), and `in_flight_tokens` are
    computed by a request that still runs. The deepest state that was evicted lay at `lost_tokens`, the deepest that
    found no slot at `refused_tokens` (0: none). It could not have resumed behind `limit_tokens`, whatever was cached.
    LRU would have resumed it at `lru_tokens`. Its own deepest state lies at `saved_tokens`.

    `positions` is where it is to save states, `boundaries` what its client declared. `earlier` lists (position, mark)
    of the resume points on its way that were known before, in order; `branch` is the mark of the one that it made
    by leaving an earlier request there (None: it made none), `tip` that of its own end. `marks` has them all, by
    position. `key` is the sequence as the history keys it, grown by the answer once it ended; `leaf` and `shadow` are
    its nodes in the history and in the guard's shadow.
    """

    __slots__ = (
        "arrived_s", "boundaries", "branch", "cached_tokens", "earlier", "ended", "hint", "id", "in_flight_tokens",
        "kept_tokens", "key", "kv_tokens", "leaf", "limit_tokens", "lost_tokens", "lru_tokens", "marks", "positions",
        "prompt_tokens", "refused_tokens", "saved_tokens", "seen_tokens", "shadow", "tip",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        arrived_s: float,
        prompt_tokens: int,
        cached_tokens: int,
        kv_tokens: int,
        key: Tokens,
        tip: Mark,
        boundaries: tuple[int, ...] = (),
        limit_tokens: int = NO_LIMIT,
    ) -> None:
        self.id = request_id
        self.arrived_s = arrived_s
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.kv_tokens = kv_tokens
        self.seen_tokens = 0
        self.kept_tokens = -1
        self.in_flight_tokens = 0
        self.lost_tokens = 0
        self.refused_tokens = 0
        self.saved_tokens = 0
        self.limit_tokens = limit_tokens
        self.lru_tokens = 0
        self.boundaries = boundaries
        self.positions: tuple[int, ...] = ()
        self.earlier: tuple[tuple[int, Mark], ...] = ()
        self.branch: Mark | None = None
        self.tip = tip
        self.marks: dict[int, Mark] = {}
        self.key = key
        self.leaf: Node | None = None
        self.shadow: Node | None = None
        self.hint = 0
        self.ended = False
