"""States that come and go, on SGLang's channel of KV events: a router then knows where this server can really resume.

The fields are those of other engines: a `BlockStored` or `BlockRemoved` whose `kv_cache_spec_kind` is "mamba", and
whose one block hash is that of the last page before the state. Readers that look for blocks of attention alone skip it.

A state is told of by tier: `medium` is where it is, as with blocks of KV.

A reader that comes late, or has lost events, asks the channel's replay socket for `SNAPSHOT`. Everything that is held
is then told once more, a few blocks at a time, among the events: sets of names do not mind what they know already.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import msgspec
from sglang.srt.disaggregation.kv_events import KVCacheEvent
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.utils import hash_str_to_int64

from sglang_hybrid.engine.cache.components import TYPES
from sglang_hybrid.routing.index import SNAPSHOT, STATE_KIND

GROUP = 1
"""Of the states; blocks of KV are group 0."""

RETOLD_PAGES = 2048
"""Pages of a snapshot between two steps of the scheduler: about ten milliseconds."""

APART_S = 1.0
"""Between two snapshots: one reader's garbage must not keep the scheduler busy."""

DEVICE, HOST = "GPU", "CPU_PINNED"
"""SGLang's words for the two tiers, whatever they are."""

_asked = Event()  # the publisher's thread sets it, the scheduler's clears it


def replay(original: Callable[..., Any], publisher: Any) -> None:
    """Around an answer of the replay socket, in the publisher's thread."""
    original(_Publisher(publisher))


class _Publisher:
    """SGLang's publisher, with a replay socket that listens for SNAPSHOT."""

    def __init__(self, publisher: Any) -> None:
        self._publisher, self._listening = publisher, _Listening(publisher._replay)

    def __getattr__(self, name: str) -> Any:
        return self._listening if name == "_replay" else getattr(self._publisher, name)


class _Listening:
    """The replay socket, as SGLang uses it."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.send_multipart = socket.send_multipart

    def recv_multipart(self) -> list[bytes]:
        frames: list[bytes] = self._socket.recv_multipart()
        if frames[-1] == SNAPSHOT:
            _asked.set()
        return frames


class _StateEvent(KVCacheEvent, kw_only=True):  # type: ignore[call-arg,misc]
    """No subclass of SGLang's own events: its recorder would join it to those of blocks.

    Every field goes over the wire: SGLang's own readers refuse a whole batch for one that is left out as a default, and
    a default that a function makes is not.
    """

    block_hashes: list[int]
    medium: str = msgspec.field(default_factory=lambda: DEVICE)
    group_idx: int = msgspec.field(default_factory=lambda: GROUP)
    kv_cache_spec_kind: str = msgspec.field(default_factory=lambda: STATE_KIND)


class _Stored(_StateEvent, tag="BlockStored", kw_only=True):  # type: ignore[call-arg,misc]
    parent_block_hash: int | None = msgspec.field(default_factory=lambda: None)
    token_ids: list[int] = msgspec.field(default_factory=lambda: [])
    block_size: int = msgspec.field(default_factory=lambda: 0)
    lora_id: int | None = msgspec.field(default_factory=lambda: None)


class _Removed(_StateEvent, tag="BlockRemoved", kw_only=True):  # type: ignore[call-arg,misc]
    pass


class StateEvents:
    """Tells of the states of one tree core, behind what its recorder tells of KV."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._snapshot: Iterator[int] | None = None
        self._next_s = -math.inf

    def retell(self) -> None:
        """Tell of what is held, if a reader asked for it: a part of it at each call, before events are taken.

        Who asks while a snapshot is told waits for the next one: readers that ask all the time hold up nobody for long.
        """
        if self._snapshot is None and _asked.is_set() and time.monotonic() >= self._next_s:
            _asked.clear()
            self._snapshot = self._retold()
        told = 0
        while self._snapshot is not None and told < RETOLD_PAGES:
            pages = next(self._snapshot, None)
            if pages is None:
                self._snapshot, self._next_s = None, time.monotonic() + APART_S
            else:
                told += pages

    def _retold(self) -> Iterator[int]:
        """Tell of every node, those above it first, and yield its pages.

        The tree changes between two steps. What comes or goes has events of its own. A split has none: the node goes on
        as its lower part, and the upper part is a new node, told of in a later round unless those below it come first.
        """
        core = self._cache.tree_core
        recorder, told = core.kv_events, {core.root_node.id}
        while untold := [named for named in core._node_arena if named not in told]:
            for named in untold:
                while named not in told and (node := core._node_arena.get(named)) is not None:
                    while node.parent.id not in told:
                        node = node.parent
                    told.add(node.id)
                    if not node.evicted:
                        recorder.record_store(node)
                    if node.backuped and node.write_through_pending_id is None:  # else SGLang tells at its end
                        recorder.record_store(node, medium=HOST)
                    for medium in self.media(node):
                        self.stored(node, medium)
                    yield len(node.key) // recorder.page_size

    @staticmethod
    def media(node: Any) -> tuple[str, ...]:
        """Where `node` has a state now."""
        data = node.component(TYPES["state"])
        return tuple(medium for medium, value in ((DEVICE, data.value), (HOST, data.host_value)) if value is not None)

    def moved(self, node: Any, before: tuple[str, ...]) -> None:
        """The state of `node` was in the media `before`, and is where `media` says now."""
        now = self.media(node)
        for medium in now:
            if medium not in before:
                self.stored(node, medium)
        for medium in before:
            if medium not in now:
                self.removed(node, medium)

    def stored(self, node: Any, medium: str = DEVICE) -> None:
        """A state was attached to `node`."""
        self._tell(_Stored, node, medium)

    def removed(self, node: Any, medium: str = DEVICE) -> None:
        """The state of `node` left the device, or another medium."""
        self._tell(_Removed, node, medium)

    def _tell(self, kind: Any, node: Any, medium: str) -> None:
        recorder: KVCacheEventRecorder = self._cache.tree_core.kv_events
        if not recorder.enabled or node.parent is None:
            return
        names = recorder._node_event_hash_values(node)
        if names:
            recorder.enqueue(kind(block_hashes=[hash_str_to_int64(names[-1])], medium=medium))
