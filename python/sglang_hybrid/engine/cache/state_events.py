"""States that come and go, on SGLang's channel of KV events: a router then knows where this server can really resume.

The fields are those of other engines: a `BlockStored` or `BlockRemoved` whose `kv_cache_spec_kind` is "mamba", and
whose one block hash is that of the last page before the state. Readers that look for blocks of attention alone skip it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sglang.srt.disaggregation.kv_events import KVCacheEvent
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.utils import hash_str_to_int64

from sglang_hybrid.prefix.index import STATE_KIND

GROUP = 1
"""Of the states; blocks of KV are group 0."""

_MEDIUM = "GPU"  # SGLang's word for the device, whatever it is


class _StateEvent(KVCacheEvent, kw_only=True):  # type: ignore[call-arg,misc]
    """No subclass of SGLang's own events: its recorder would join it to those of blocks."""

    block_hashes: list[int]
    medium: str = msgspec.field(default_factory=lambda: _MEDIUM)
    group_idx: int = msgspec.field(default_factory=lambda: GROUP)
    kv_cache_spec_kind: str = msgspec.field(default_factory=lambda: STATE_KIND)


class _Stored(_StateEvent, tag="BlockStored", kw_only=True):  # type: ignore[call-arg,misc]
    parent_block_hash: int | None = msgspec.field(default_factory=lambda: None)
    token_ids: list[int] = msgspec.field(default_factory=list)
    block_size: int = 0


class _Removed(_StateEvent, tag="BlockRemoved", kw_only=True):  # type: ignore[call-arg,misc]
    pass


class StateEvents:
    """Tells of the states of one tree core, behind what its recorder tells of KV."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def stored(self, node: Any) -> None:
        """A state was attached to `node`."""
        self._tell(_Stored, node)

    def removed(self, node: Any) -> None:
        """The state of `node` left the device."""
        self._tell(_Removed, node)

    def _tell(self, kind: Any, node: Any) -> None:
        recorder: KVCacheEventRecorder = self._cache.tree_core.kv_events
        if not recorder.enabled or node.parent is None:
            return
        names = recorder._node_event_hash_values(node)
        if names:
            recorder.enqueue(kind(block_hashes=[hash_str_to_int64(names[-1])]))
