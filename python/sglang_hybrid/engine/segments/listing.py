"""What a scheduler says of its entries, and drops, when the HTTP process asks (`frontend.segments.questions`).

The question comes as SGLang's message for its dumper, the one control message that carries an object either way. Like
every other it reaches all ranks in the same place of the order of requests, so all of them drop the same entries.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sglang_hybrid.engine.segments.exchange import QUESTIONS
from sglang_hybrid.segment.index import Entry

if TYPE_CHECKING:
    from sglang_hybrid.engine.segments.composer import Composer

METHOD = "hybrid_segments"
"""The message's `method`; its `body` has one of `list`, `find` and `drop`, or of `exchange.QUESTIONS`."""

ALL, ERROR = "all", "error"
"""Several bodies in one message; what is said instead of an answer to one of them."""

MOST_LISTED = 10_000
_SPARE = 1_024

logger = logging.getLogger(__name__)


class Births:
    """When entries were made, and for whom, by their number."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, str | None]] = {}
        self._most = _SPARE
        self._secret = secrets.token_bytes(16)

    def made(self, entry: Entry, now: float, namespace: str | None, numbers: Iterable[int]) -> None:
        """`entry` was made at `now` seconds for the tenant `namespace`; `numbers` are those of all that are left."""
        self._known[entry.number] = (now, None if namespace is None else self._digest(namespace))
        if len(self._known) > self._most:
            alive = set(numbers)
            self._known = {number: birth for number, birth in self._known.items() if number in alive}
            self._most = 2 * len(self._known) + _SPARE

    def of(self, entry: Entry) -> tuple[float, str | None]:
        """When `entry` was made, and the digest of its tenant; None is who has no name."""
        return self._known[entry.number]

    def _digest(self, namespace: str) -> str:
        """A tenant's name for eyes: drawn anew with every start, so that no salt can be guessed by trying."""
        return hashlib.blake2b(namespace.encode(), digest_size=8, key=self._secret).hexdigest()


def answer(composer: Composer, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question.

    `{"list": n}`: the last n entries that were made, and how much they all hold; `{"find": [[id, ...], ...],
    "namespace": name}`: for each list of token ids its key, with the entry if there is one; `{"drop": [key, ...]}`:
    those keys that were dropped, `{"drop": None}`: all of them.
    """
    index = composer.index
    if "list" in body:
        newest = sorted(index, key=lambda entry: -entry.number)[: min(int(body["list"]), MOST_LISTED)]
        store = composer.store
        return {
            "entries": [told(composer, entry) for entry in newest if not entry.making],
            "count": len(index),
            "bytes": sum(index.held(entry) for entry in index),
            "memory_bytes": store.total_bytes,
            "transitions_kept": None if index.transitions_kept is None else round(index.transitions_kept, 4),
        }
    if "find" in body:
        found = []
        for ids in body["find"]:
            key = composer.identity.key(array("q", ids), body.get("namespace"))
            entry = index.find(key)
            found.append({"key": key.hex()} if entry is None or entry.making else told(composer, entry))
        return {"entries": found}
    wanted = None if body["drop"] is None else set(body["drop"])
    going = [entry for entry in index if wanted is None or entry.key.hex() in wanted]
    for entry in going:
        index.drop(entry)
    composer.tell()
    return {"dropped": [entry.key.hex() for entry in going]}


def told(composer: Composer, entry: Entry) -> dict[str, Any]:
    """What is said of an entry: tokens of the whole segment, bytes on each rank; nothing of its text."""
    made_s, tenant = composer.births.of(entry)
    return {
        "key": entry.key.hex(),
        "tokens": composer.seams.head + entry.tokens + composer.seams.tail,
        "bytes": composer.index.held(entry),
        "hits": entry.hits,
        "age_s": round(max(0.0, composer.now() - made_s), 3),
        "in_use": entry.pins > 0,
        "tenant": tenant,
    }


def control(original: Callable[..., Any], scheduler: Any, message: Any) -> Any:
    """AROUND hook of the scheduler's handler of that message."""
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    from sglang_hybrid.engine.segments.hooks import composer_of

    if message.method != METHOD:
        return original(scheduler, message)
    composer = composer_of(scheduler.tree_cache)
    if composer is None:
        return DumperControlReqOutput(success=False, response=[], error="this server keeps no segments")
    cache, body = scheduler.tree_cache, message.body
    if isinstance(body, dict) and ALL in body:
        return DumperControlReqOutput(success=True, response=[_said(composer, cache, each) for each in body[ALL]])
    said = _said(composer, cache, body)
    if ERROR in said:
        return DumperControlReqOutput(success=False, response=[], error=said[ERROR])
    return DumperControlReqOutput(success=True, response=[said])


def _said(composer: Composer, cache: Any, body: dict[str, Any]) -> dict[str, Any]:
    try:
        if composer.exchange is not None and any(name in body for name in QUESTIONS):
            return composer.exchange.answer(cache, body)
        return answer(composer, body)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:  # no question is worth a scheduler
        return {ERROR: f"no such question of segments: {error!r:.80}"}
