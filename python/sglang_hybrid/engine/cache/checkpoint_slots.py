"""The state slots of checkpoints that are being made: taken before a forward pass, and given back if need be."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.engine.cache.requests import Checkpoint, Tracked


class CheckpointSlots:
    """Slots of SGLang's allocator `states` that planned checkpoints hold; its length is how many there are."""

    def __init__(self, states: Any) -> None:
        self._states = states
        self._outstanding: dict[int, Checkpoint] = {}

    def __len__(self) -> int:
        return len(self._outstanding)

    def reserve(self, record: Tracked, position: int, wanted: int) -> bool:
        """Plan a checkpoint of the request at `position`, for the `wanted` one; False if there is no slot for it."""
        slot = self._states.alloc(1)
        if slot is None:
            return False
        # What the allocator hands out is a view of its list of free slots, which would live as long as the state.
        checkpoint = Checkpoint(position, wanted, slot.clone())
        record.planned.append(checkpoint)
        self._outstanding[id(checkpoint)] = checkpoint
        return True

    def take(self, record: Tracked, end: int) -> list[Checkpoint]:
        """The checkpoints up to `end` that the last pass wrote, deepest first; the caller owns their slots now."""
        if not record.planned:
            return []
        good = [c for c in record.planned if c.slot is not None and c.written and c.position <= end]
        for checkpoint in good:
            record.planned.remove(checkpoint)
            self._outstanding.pop(id(checkpoint), None)
        self.free_planned(record)
        return sorted(good, key=lambda c: -c.position)

    def free(self, checkpoint: Checkpoint) -> None:
        """Free the slot of a checkpoint that was taken and is not needed."""
        if checkpoint.slot is not None:
            self._states.free(checkpoint.slot)
            checkpoint.slot = None

    def free_planned(self, record: Tracked) -> None:
        """Free what is still planned: it was not written, or its request is gone."""
        for checkpoint in record.planned:
            self._outstanding.pop(id(checkpoint), None)
            self.free(checkpoint)
        record.planned.clear()

    def reclaim(self, count: int) -> int:
        """Take back the slots of up to `count` checkpoints, which are then not saved; returns how many."""
        taken = list(self._outstanding.values())[:count]
        for checkpoint in taken:
            del self._outstanding[id(checkpoint)]
            self.free(checkpoint)
        return len(taken)
